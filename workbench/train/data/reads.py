"""Finds whether Python code reads a model's own tensors, of which a rank has old copies."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.model.tracing.batch import tensors
from workbench.model.tracing.trials.saved import memory_of


def held_by(module: nn.Module | None) -> dict[int, str]:
    """The names of the tensors that a model holds, by their memory."""
    found = {}
    for path, part in module.named_modules() if module is not None else ():
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, Tensor) and value.numel():
                    (memory,) = memory_of([value])
                    found[memory] = f"{path}.{name}".lstrip(".")
    return found


class Reads(TorchDispatchMode):
    """Finds operations that read a model's own tensors.

    Args:
        held: their names, by their memory.

    Attributes:
        names: the names of those that were read.
    """

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
