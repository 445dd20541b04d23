"""A stand-in for a GPU whose memory ranks share: what is written there is late, until settled."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.comm.groups.world import RankConfig
from workbench.comm.shared_memory.segment import Offer, attach, create, mapped

COPY = torch.ops.aten.copy_.default


class StandIn(TorchDispatchMode):
    """Memory of the host in the place of a GPU's.

    A write into it is done when the same rank reads anything there, as on one stream, or settles:
    other ranks do not see it before.
    """

    device, name = torch.device("cpu"), "stand-in"

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[int, Offer] = {}
        self.shared: set[int] = set()
        self.late: list[Callable[[], object]] = []

    def make(self, size: int) -> Tensor:
        offer = create(size, reserved=True)
        memory = self._tensor(mapped(offer.fd, size))
        self.own[memory.data_ptr()] = offer
        return memory

    def offer(self, memory: Tensor) -> str:
        return json.dumps(asdict(self.own[memory.data_ptr()]))

    def attach(self, offer: str) -> Tensor:
        return self._tensor(attach(Offer(**json.loads(offer))))

    def alias(self, memory: Tensor) -> Tensor:
        offer = self.own[memory.data_ptr()]
        return self._tensor(mapped(offer.fd, offer.size))

    def settle(self) -> None:
        late, self.late = self.late, []
        with _disable_current_modes():
            for write in late:
                write()

    def close(self) -> None:
        for offer in self.own.values():
            os.close(offer.fd)

    def _tensor(self, memory: Any) -> Tensor:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.shared.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is COPY and self._is_there(args[0]) and not self._is_there(args[1]):
            target, source = args[0], args[1].clone()
            self.late.append(lambda: target.copy_(source))
            return target
        if (kwargs or {}).get("out") is not None and self._is_there(kwargs["out"]):
            self.settle()
            out, made = kwargs["out"], torch.empty_like(kwargs["out"])
            function(*args, **kwargs | {"out": made})
            self.late.append(lambda: out.copy_(made))
            return out
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.late and any(map(self._is_there, tensors)) and not _is_view(function):
            self.settle()
        return function(*args, **(kwargs or {}))

    def _is_there(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.shared


def _is_view(function: Any) -> bool:
    return any(one.alias_info and not one.alias_info.is_write for one in function._schema.arguments)


def on_stand_in(config: RankConfig, function: Callable[..., Any], *args: Any) -> Any:
    """A function of one rank, whose slots and buffers lie on the stand-in."""
    memory = StandIn()
    with patch("workbench.comm.groups.world.memory_of", lambda device: memory), memory:
        found = function(config, *args)
    memory.close()
    return found
