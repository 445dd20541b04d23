"""Sums of what several ranks have brought, in their order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.comm.pieces import accumulator

# Sums are taken so many bytes at a time, which stay in a core's cache meanwhile.
BLOCK_BYTES = 2**17


def added(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum of two or more equal parts, in their order, into `out`, which is none of them.

    Half types sum in fp32.
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
    """Where to cut flat tensors like this one, so that parts of several stay in the cache."""
    step = BLOCK_BYTES // flat.itemsize
    return [slice(start, start + step) for start in range(0, len(flat), step)]
