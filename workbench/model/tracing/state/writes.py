"""Fake tensors that refuse writes into a model's own parameters and buffers.

A forward pass that writes into them keeps state. Each rank would have its own, and a traced graph
would not even have the operation: `for p in self.parameters(): p.data.clamp_(-1, 1)` involves no
proxy, so nothing records it. Every operation on fake tensors passes through their mode, whatever
way led to it, and says in its schema what it writes into. Values do not matter: a clamp that clips
nothing yet is a write, and so is a teacher that moves towards a student that it still equals.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.tracing.batch import tensors
from workbench.model.tracing.trials.saved import memory_of

_NONE: Mapping[str, Any] = MappingProxyType({})


class ModelFakes(FakeTensorMode):
    """The mode of a traced model's fake tensors.

    Args:
        refuse: is called with the name of a tensor that is written into, and that of the operation;
            raises.
    """

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._names: dict[int, str] = {}  # by the memory of the model's own tensors
        self._allowed: frozenset[int] = frozenset()

    def hold(self, module: nn.Module) -> None:
        """Guards the parameters and buffers of a module, and of no other."""
        self._names = {
            memory: name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            for memory in memory_of([tensor])
        }

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the guarded tensor that has this tensor's memory; None: there is none."""
        (memory,) = memory_of([tensor])
        return self._names.get(memory)

    @contextmanager
    def running(self, module: nn.Module | None) -> Iterator[None]:
        """Lets a batch norm update its own statistics while it runs."""
        if not isinstance(module, _BatchNorm):
            yield
            return
        self._allowed = memory_of(module.buffers())
        try:
            yield
        finally:
            self._allowed = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelFakes":
        return self  # of copies that a model makes of its own parts

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Any:
        if func._schema.is_mutable:
            self._look(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tensors(given):
                name = self.name_of(tensor)
                if name is not None and not memory_of([tensor]) & self._allowed:
                    self._refuse(name, str(func))
