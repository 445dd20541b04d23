"""Reshapes with their sizes stated, so that they also work on a batch without rows.

`x.view(-1, 512)` and its like after a convolution become `torch.flatten(x, 1)`, which says the
same for a tensor whose channels are cut.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def is_reshape(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this gives a tensor other sizes; `view` with a dtype gives it another meaning."""
    if target not in ("view", "reshape", torch.reshape) or kwargs or len(args) < 2:
        return False
    return isinstance(args[0], Node) and not isinstance(args[1], torch.dtype)


def stated(target: Any, args: tuple[Any, ...], after: Tensor) -> tuple[str, Any, tuple[Any, ...]]:
    """The same operation, as kind, target and arguments of a node.

    Args:
        target: of a reshape.
        args: of it.
        after: what it gives for one batch.
    """
    source: Node = args[0]
    before = source.meta["values"][0]
    features = math.prod(before.shape[1:])
    if source.meta["depends"] and before.ndim > 2 and after.shape == (len(before), features):
        return "call_function", torch.flatten, (source, 1)
    sizes = [
        length if size == -1 and dim > 0 else size
        for dim, (size, length) in enumerate(zip(_sizes(args), after.shape, strict=True))
    ]
    return "call_method", "view" if target == "view" else "reshape", (source, *sizes)


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Given one by one, or in one list."""
    return tuple(args[1]) if isinstance(args[1], list | tuple) else args[1:]
