"""Copies of what a person brought, as ranks get them; and what of a model's own tensors they read.

A trial calls a copy, so that what it remembers of made-up values stays in no object of the user's.
And one copy that has seen something shows beside a fresh one whether that makes a difference.
"""

import io
import math
import pickle
from collections.abc import Container, Mapping
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.model.record.batch import tensors
from workbench.model.record.runs import memory_of

T = TypeVar("T")


def copied(value: T, held: Container[int] = (), *, shared_bytes: float = math.inf) -> T:
    """A copy with its own closures, globals and attributes; the value, where it cannot be pickled.

    Args:
        held: the memory of tensors that are shared with the copy: a model's own.
        shared_bytes: tensors and arrays from this size on are shared, too.
    """
    file = io.BytesIO()
    writer = _Writer(file, held, shared_bytes)
    try:
        writer.dump(value)
        file.seek(0)
        return _Reader(file, writer.shared).load()
    except Exception:  # whatever its own code raises; submitting it says so
        return value


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, held: Container[int], shared_bytes: float) -> None:
        super().__init__(file)
        self.shared, self._held, self._shared_bytes = list[Any](), held, shared_bytes

    def persistent_id(self, value: Any) -> int | None:
        """The place of a tensor or an array that is shared."""
        if isinstance(value, np.ndarray):
            is_shared = value.nbytes >= self._shared_bytes
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            is_shared = value.nbytes >= self._shared_bytes
            is_shared |= any(memory in self._held for memory in memory_of([value]))
        else:
            return None
        if is_shared:
            self.shared.append(value)
        return len(self.shared) - 1 if is_shared else None


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> Any:
        return self._shared[place]


def held_by(module: nn.Module | None) -> dict[int, str]:
    found = {}
    for path, part in module.named_modules() if module is not None else ():
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, Tensor) and value.numel():
                    (memory,) = memory_of([value])
                    found[memory] = f"{path}.{name}".lstrip(".")
    return found


class Reads(TorchDispatchMode):
    def __init__(self, held: Mapping[int, str]) -> None:
        super().__init__()
        self._held, self.names = held, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for memory in memory_of(tensors((args, dict(kwargs or {})))):
            if memory in self._held:
                self.names.append(self._held[memory])
        return func(*args, **(kwargs or {}))
