"""Collectives for pieces of any sizes, along any dimension, that leave their inputs alone.

Sums are taken by one rank, in rank order, and then handed out, so that they are bitwise equal on
all ranks; half types are summed in fp32. (Algorithms of the all-reduce that do otherwise say so.)
A rank of a group of k receives, of a tensor of b bytes in equal pieces,

    all_gather       b (k-1)/k      every piece broadcast straight into its place
    reduce_scatter   b (k-1)/k      the pieces swapped, then summed by their owners
    all_to_all       b (k-1)/k^2    the intersections of old and new pieces swapped
    all_reduce       2 b (k-1)/k    by one of several algorithms (all_reduce.py)
    broadcast        b              but the root

and exactly its part for unequal ones. (gloo's own all-gather refuses unequal pieces, and its
reduce-scatter is one all-reduce for each rank.)

Ranks of one host that share memory (`Group.staging`) stage every piece once instead, where the
others read it; sums, counts and results are the same. What these functions do themselves is the
way through torch's communicators.

In all of them x is this rank's tensor, of the dtype and rank of the result on every rank, and
`layer` and `phase` label the record.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce as all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.record import Phase
from workbench.comm.pending import Pending as Pending
from workbench.comm.pending import start_all_reduce as start_all_reduce
from workbench.comm.pieces import accumulator, cut, lengths, pack, resized, shaped, unpack
from workbench.comm.shared_memory import collectives as shared
from workbench.comm.transfer import spread, swap
from workbench.plan.placement import Shard


@torch.no_grad()
def all_gather(
    x: Tensor, shard: Shard, group: Group, *, layer: str = "", phase: Phase = "step"
) -> Tensor:
    """Makes whole, on every rank, the tensor of which x is this rank's piece."""
    _check(x, shard, group, whole=False)
    shape = resized(x.shape, shard.dim, shard.extent)
    owned = lengths(shape, shard.dim, shard.sizes)
    call = group.call("all_gather", layer, phase)
    with call.timed():
        if group.staging is not None:
            call.count(owned, x.itemsize)
            return shared.all_gather(x, shard, group.staging, call)
        flat = x.new_empty(sum(owned))
        cut(flat, owned)[group.rank].view(x.shape).copy_(x)
        spread(flat, owned, call)
        return unpack(flat, shape, shard.dim, shard.sizes)


@torch.no_grad()
def reduce_scatter(
    x: Tensor, shard: Shard, group: Group, *, layer: str = "", phase: Phase = "step"
) -> Tensor:
    """Computes this rank's piece of the sum of all ranks' x."""
    _check(x, shard, group, whole=True)
    shape = resized(x.shape, shard.dim, shard.sizes[group.rank])
    sent = lengths(x.shape, shard.dim, shard.sizes)
    call = group.call("reduce_scatter", layer, phase)
    with call.timed():
        if group.staging is not None:
            call.count([sent[group.rank]] * group.size, x.itemsize, adds=True)
            return shared.reduce_scatter(x, shard, group.staging, call)
        flat = pack(x, shard.dim, shard.sizes)
        parts = swap(flat, sent, [sent[group.rank]] * group.size, call, adds=True)
        return shaped(_sum(parts, group.size), shape)


@torch.no_grad()
def all_to_all(
    x: Tensor,
    source: Shard,
    target: Shard,
    group: Group,
    *,
    layer: str = "",
    phase: Phase = "step",
) -> Tensor:
    """Turns x, this rank's piece of a tensor cut by `source`, into its piece by `target`."""
    _check(x, source, group, whole=False)
    given: Sequence[int]
    taken: Sequence[int]
    if source.dim == target.dim:
        given, taken = _overlaps(source, target, group)
    else:
        _check(x, target, group, whole=True)
        given, taken = target.sizes, source.sizes
    shape = resized(x.shape, target.dim, target.sizes[group.rank])
    shape = resized(shape, source.dim, sum(taken))
    sent = lengths(x.shape, target.dim, given)
    received = lengths(shape, source.dim, taken)
    call = group.call("all_to_all", layer, phase)
    with call.timed():
        if group.staging is not None:
            call.count(received, x.itemsize)
            return shared.all_to_all(x, source, target, group.staging, call)
        flat = swap(pack(x, target.dim, given), sent, received, call)
        return unpack(flat, shape, source.dim, taken)


@torch.no_grad()
def broadcast(
    x: Tensor, root: int, group: Group, *, layer: str = "", phase: Phase = "step"
) -> Tensor:
    """Copies x from the rank at index `root` of the group; elsewhere x states shape and dtype."""
    if not 0 <= root < group.size:
        raise ValueError(f"root must be one of 0..{group.size - 1}, got {root}")
    call = group.call("broadcast", layer, phase)
    with call.timed():
        if group.staging is not None:
            owned = [x.numel() if rank == root else 0 for rank in range(group.size)]
            call.count(owned, x.itemsize)
            return shared.broadcast(x, root, group.staging, call)
        flat = x.reshape(-1).clone() if group.rank == root else x.new_empty(x.numel())
        spread(flat, [len(flat) if rank == root else 0 for rank in range(group.size)], call)
        return shaped(flat, x.shape)


def _sum(parts: Tensor, count: int) -> Tensor:
    """Sum of `count` equal parts of a flat buffer, in their order; half types sum in fp32.

    (`Tensor.sum` adds five or more rows in an order that differs by column.)
    """
    first, *others = parts.view(count, len(parts) // count)
    total = first.to(accumulator(parts.dtype), copy=True)
    for other in others:
        total += other
    return total.to(parts.dtype)


def _overlaps(source: Shard, target: Shard, group: Group) -> tuple[list[int], list[int]]:
    """What this rank gives to and takes from each rank when one dimension is cut anew."""
    if source.extent != target.extent or len(target.sizes) != group.size:
        raise ValueError(f"cannot turn {source} into {target} on {group}")
    given = [_overlap(source.span(group.rank), target.span(r)) for r in range(group.size)]
    taken = [_overlap(source.span(r), target.span(group.rank)) for r in range(group.size)]
    return given, taken


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    """Elements that two (start, length) spans share."""
    return max(0, min(sum(a), sum(b)) - max(a[0], b[0]))


def _check(x: Tensor, shard: Shard, group: Group, *, whole: bool) -> None:
    """Refuses an x that is not the whole tensor, or this rank's piece, that `shard` describes."""
    if len(shard.sizes) != group.size:
        raise ValueError(f"{shard} has {len(shard.sizes)} sizes, {group} has {group.size} ranks")
    length = shard.extent if whole else shard.sizes[group.rank]
    if shard.dim >= x.ndim or x.shape[shard.dim] != length:
        raise ValueError(
            f"{group} wants {length} elements along dim {shard.dim} for {shard}, "
            f"got shape {tuple(x.shape)}"
        )
