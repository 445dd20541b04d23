"""Flat buffers of consecutive pieces, which are what travels, and rounds of messages.

An algorithm is a generator. It yields the exchanges of one rank, one after another, and is
resumed when what it wanted to receive is there and what it wanted to send may be overwritten.
It knows neither how tensors travel nor who waits for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from workbench.plan.placement.placement import apportion

Message = tuple[int, Tensor]
"""(index of the other rank in the group, the flat tensor that travels)."""

HostGroups = tuple[tuple[int, ...], ...]
"""The ranks of each host, as indices in their group."""


@dataclass(frozen=True)
class MessageRound:
    """One round of one rank: all of its messages are under way at the same time.

    Attributes:
        sends: the flat tensors that this rank sends, and to whom; empty ones do not travel.
        receives: the flat tensors to be filled, and from whom. What one rank sends another
            arrives in the order in which it was sent.
        additions: the number of elements that this rank adds to others once they have come.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    additions: int = 0


MessageRounds = Iterator[MessageRound]


class AsyncOperation(Protocol):
    """Something under way, which goes on beside other work whenever somebody advances it."""

    def advance(self) -> bool:
        """Does what has become possible without waiting; returns whether all is done."""
        ...

    def wait(self) -> None:
        """Returns when all is done.

        Raises:
            CommError: other ranks did not come, as for a collective that blocks.
        """
        ...


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Returns `shape` with `size` elements along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def lengths(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """Returns the elements of each piece, of `sizes` along `dim`, of a tensor of `shape`."""
    slab = prod(resized(shape, dim, 1))
    return [size * slab for size in sizes]


def cut(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Returns views of x's consecutive pieces of `sizes` along `dim`."""
    return torch.split_with_sizes(x, list(sizes), dim)


@lru_cache(maxsize=256)
def even(length: int, count: int) -> tuple[int, ...]:
    """Returns `count` near-equal sizes that sum to `length`."""
    return apportion(length, (1,) * count)


def shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Gives a flat buffer, which owns its memory, its shape.

    It is no view: autograd forbids work in place on a view that comes out of a Function.
    """
    return flat.resize_(tuple(shape))


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns x's pieces along `dim` one after another [x.numel()]; copies only if it must."""
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    flat = x.new_empty(x.numel())
    places = cut(flat, lengths(x.shape, dim, sizes))
    for piece, place in zip(cut(x, sizes, dim), places, strict=True):
        place.view(piece.shape).copy_(piece)
    return flat


def unpack(flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns the tensor of `shape` that was packed; takes over `flat` where it can."""
    if prod(shape[:dim]) == 1:
        return shaped(flat, shape)
    parts = cut(flat, lengths(shape, dim, sizes))
    return torch.cat(
        [part.view(resized(shape, dim, n)) for part, n in zip(parts, sizes, strict=True)], dim
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which values of `dtype` are summed: fp32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Sums are taken so many bytes at a time, which stay in a core's cache meanwhile.
BLOCK_BYTES = 2**17


def added(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sums two or more parts of one shape, in their order; half types in fp32.

    Args:
        out: the tensor that becomes the sum, none of the parts; None: a new one.
    """
    first, second, *others = parts
    wide = accumulator(first.dtype)
    if wide != first.dtype:
        total = first.to(wide)
        total += second
    else:
        total = torch.add(first, second) if out is None else torch.add(first, second, out=out)
    for other in others:
        total += other
    if wide == first.dtype:
        return total
    return total.to(first.dtype) if out is None else out.copy_(total)


def blocks(flat: Tensor) -> list[slice]:
    """Returns where to cut flat tensors like this one, so that parts of several stay in cache."""
    step = BLOCK_BYTES // flat.itemsize
    return [slice(start, start + step) for start in range(0, len(flat), step)]
