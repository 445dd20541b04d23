"""Tensors as consecutive pieces in one flat buffer, which is what travels."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from workbench.plan.placement import apportion


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with `size` elements along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def lengths(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """Elements of each piece, of `sizes` along `dim`, of a tensor of `shape`."""
    slab = prod(resized(shape, dim, 1))
    return [size * slab for size in sizes]


def cut(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of x's consecutive pieces along `dim`."""
    return torch.split_with_sizes(x, list(sizes), dim)


@lru_cache(maxsize=256)
def even(length: int, count: int) -> tuple[int, ...]:
    """Near-equal sizes that sum to `length`."""
    return apportion(length, (1,) * count)


def shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Gives a flat buffer, which owns its memory, its shape.

    It is no view: autograd forbids work in place on a view that comes out of a Function.
    """
    return flat.resize_(tuple(shape))


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of x along `dim`, each contiguous, one after another; copies only if it must."""
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    flat = x.new_empty(x.numel())
    places = cut(flat, lengths(x.shape, dim, sizes))
    for piece, place in zip(cut(x, sizes, dim), places, strict=True):
        place.view(piece.shape).copy_(piece)
    return flat


def unpack(flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor:
    """The inverse of `pack`, for a tensor of `shape`; takes over `flat` where it can."""
    if prod(shape[:dim]) == 1:
        return shaped(flat, shape)
    parts = cut(flat, lengths(shape, dim, sizes))
    return torch.cat(
        [part.view(resized(shape, dim, n)) for part, n in zip(parts, sizes, strict=True)], dim
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which to sum values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
