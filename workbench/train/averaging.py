"""Weighted means of tensors over the ranks of a group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.comm.collectives import start_all_reduce
from workbench.comm.group import Group


@torch.no_grad()
def average(tensors: Sequence[Tensor], part: float, group: Group, bucket_bytes: int) -> None:
    """Replaces tensors by their weighted mean over the group, bitwise equal on all ranks.

    A rank receives 2 (k-1)/k of their bytes, k the group's size; beside them it needs the room
    of one bucket.

    Args:
        tensors: of any shapes and floating dtypes, the same on all ranks; changed in place.
        part: this rank's weight; those of the group add up to 1.
        group: who averages.
        bucket_bytes: a bucket is closed once it holds this much.
    """
    if group.size == 1:
        return
    for bucket in _bucketed(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).mul_(part)
        start_all_reduce(flat, group, layer="parameters").wait()
        pieces = flat.split([tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


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
