"""Weighted means of tensors over the ranks of groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.collectives import start_all_reduce
from workbench.comm.group import Group


@dataclass(frozen=True)
class Mean:
    """What one group averages.

    Attributes:
        tensors: of any shapes and floating dtypes, the same on all ranks; changed in place.
        part: this rank's weight; those of the group add up to 1.
        group: who averages.
    """

    tensors: Sequence[Tensor]
    part: float
    group: Group


@torch.no_grad()
def average(means: Sequence[Mean], bucket_bytes: int) -> None:
    """Replaces tensors by their weighted means over groups, bitwise equal on all ranks.

    A rank receives 2 (k-1)/k of their bytes, k the group's size. Beside them it needs the room of
    the largest bucket of all groups, in which all of a dtype take turns.

    Args:
        means: in the same order on all ranks.
        bucket_bytes: a bucket is closed once it holds this much.
    """
    buckets = [
        (bucket, mean)
        for mean in means
        if mean.group.size > 1
        for bucket in _bucketed(mean.tensors, bucket_bytes)
    ]
    rooms = _rooms([bucket for bucket, _ in buckets])
    for bucket, mean in buckets:
        sizes = [tensor.numel() for tensor in bucket]
        flat = rooms[bucket[0].dtype][: sum(sizes)]
        places = [
            piece.view_as(tensor) for piece, tensor in zip(flat.split(sizes), bucket, strict=True)
        ]
        for tensor, place in zip(bucket, places, strict=True):
            torch.mul(tensor, mean.part, out=place)
        start_all_reduce(flat, mean.group, layer="parameters").wait()
        for tensor, place in zip(bucket, places, strict=True):
            tensor.copy_(place)


def _bucketed(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Tensors of one dtype together, in their order; empty ones are left out."""
    buckets: list[list[Tensor]] = []
    opened: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        bucket = opened.get(tensor.dtype, [])
        if not bucket:
            buckets.append(bucket)
        bucket.append(tensor)
        full = sum(t.nbytes for t in bucket) >= bucket_bytes
        opened[tensor.dtype] = [] if full else bucket
    return buckets


def _rooms(buckets: Sequence[Sequence[Tensor]]) -> dict[torch.dtype, Tensor]:
    """For each dtype, as much memory as its largest bucket takes."""
    most: dict[torch.dtype, int] = {}
    for first, *others in buckets:
        numel = first.numel() + sum(tensor.numel() for tensor in others)
        most[first.dtype] = max(numel, most.get(first.dtype, 0))
    like = {bucket[0].dtype: bucket[0] for bucket in buckets}
    return {dtype: like[dtype].new_empty(numel) for dtype, numel in most.items()}
