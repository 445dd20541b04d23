"""Operations in code of the user's own, tried again by halves of their rows while a model trains.

When a model is traced, such an operation is tried on random numbers. It may mix samples, or keep
state, in a part of its range only; so some calls are tried again on what they really read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from workbench.model.errors import TraceError
from workbench.model.record.batch import tensors
from workbench.model.trials.probe import alike
from workbench.plan.extension.user_object import is_looked_at
from workbench.plan.graph.graph import Layer

_HALVES = (torch.bfloat16, torch.float16)


class LookedAt:
    """Looks at the calls of one operation.

    Args:
        rows: its (args, kwargs), with the rows of each sample in the place of each value; 0: none.

    Raises:
        TraceError: a half of the rows gives something else than all rows together.
    """

    def __init__(self, layer: Layer, rows: Any) -> None:
        self._name, self._each, self._rows = layer.name, layer.rows, rows
        self._calls = 0

    @torch.no_grad()
    def __call__(self, call: Callable[..., Any], arguments: Any, result: Any) -> None:
        """Tries the operation again, if this call of it is one that is looked at."""
        self._calls += 1
        made = tensors(result) if is_looked_at(self._calls) else []
        if not made or any(one.is_meta or one.dtype in _HALVES for one in made):
            return
        samples = len(made[0]) // self._each
        half = samples // 2
        for begin, end in ((0, half), (half, samples)) if half else ():
            args, kwargs = _part(arguments, self._rows, begin, end)
            found = tensors(call(*args, **kwargs))
            expected = [one.unflatten(0, (samples, -1))[begin:end].flatten(0, 1) for one in made]
            if not alike(found, expected, rounded=True):
                raise TraceError(
                    f"layer {self._name!r} mixes samples, or keeps state: {end - begin} of "
                    f"{samples} rows give something else by themselves than among the others. "
                    "Each rank has its own rows: treat each sample by itself, whatever the values "
                    "are, and remember nothing from call to call"
                )


class LookedAtFunction(nn.Module):
    """A function whose calls are looked at."""

    def __init__(self, function: Callable[..., Any], look: LookedAt) -> None:
        super().__init__()
        self.function, self.look = function, look

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        self.look(self.function, (args, kwargs), result)
        return result


def look_at_module(module: nn.Module, look: LookedAt) -> None:
    """Has the calls of a module looked at."""

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        look(module.forward, (args, kwargs), result)

    module.register_forward_hook(hook, with_kwargs=True)


def _part(value: Any, rows: Any, begin: int, end: int) -> Any:
    """The samples from one to before another, of whatever has rows of them."""
    if isinstance(rows, int):

        def taken(x: Tensor) -> Tensor:
            return x[begin * rows : end * rows].clone()

        return pytree.tree_map_only(Tensor, taken, value) if rows else value
    if isinstance(value, dict):
        return {name: _part(each, rows[name], begin, end) for name, each in value.items()}
    if isinstance(value, list | tuple):
        parts = (_part(*pair, begin, end) for pair in zip(value, rows, strict=True))
        return list(parts) if isinstance(value, list) else tuple(parts)
    return value
