"""Tensors as consecutive pieces in one flat buffer, which is what travels."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod

import torch
from torch import Tensor

from workbench.plan.placement import apportion

# Below the first, memory mostly comes from what was given back before. Above the second a host
# whose memory is in small pieces may search for seconds (seen in a virtual machine, at 256 MB).
_LARGE_BYTES, _VAST_BYTES = 2**22, 2**26


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


def new_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for a result, of x's dtype and device, that is quick to have also where it is large.

    New memory comes in pages of 4 KiB, each with a fault when it is first touched; at 64 MB these
    take four times as long as a copy. Linux gives pages of 2 MiB to those who ask.
    """
    result = x.new_empty(tuple(shape))
    on_linux = sys.platform == "linux" and x.device.type == "cpu"
    if on_linux and _LARGE_BYTES <= result.nbytes <= _VAST_BYTES:
        start = -(-result.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (result.data_ptr() + result.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(start, length, mmap.MADV_HUGEPAGE)  # a hint: whether it is taken is no matter
    return result


@cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


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
