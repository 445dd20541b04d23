"""Batch and instance norm of one row, which torch misreads on the CPU if it lies unusually.

A tensor of one row may have any stride along its rows; after a transposition it has another than
one of many rows has. Where its channels lie innermost as well, torch's kernels (seen with 2.13)
read other elements, of the input and of the gradient, and say nothing. A rank has one row more
often than one process has.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def in_order(x: Tensor) -> Tensor:
    """One row with the elements in order; several rows as they are."""
    if x.ndim < 3 or x.shape[0] != 1 or x.stride(0) == x.numel():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def read_in_order(norm: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a norm gives for x, [rows, channels, ...], however x and its gradient lie."""
    if x.shape[0] != 1:
        return norm(x, *args, **kwargs)
    y = norm(in_order(x), *args, **kwargs)
    if y.requires_grad:
        y.register_hook(in_order)
    return y


def batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `torch.nn.functional.batch_norm`."""
    return read_in_order(F.batch_norm, x, *args, **kwargs)


def instance_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `torch.nn.functional.instance_norm`."""
    return read_in_order(F.instance_norm, x, *args, **kwargs)


def guard(norm: nn.Module) -> None:
    """Lets a norm of torch's own read its input, and the gradient of its output, in order."""
    norm.register_forward_pre_hook(lambda _norm, given: (in_order(given[0]), *given[1:]))
    norm.register_forward_hook(_guard_gradient)


def _guard_gradient(_norm: nn.Module, _given: tuple[Tensor, ...], y: Tensor) -> None:
    if y.requires_grad and y.shape[0] == 1:
        y.register_hook(in_order)
