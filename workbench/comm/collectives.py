"""Collectives for pieces of any sizes, along any dimension, that leave their inputs alone.

Sums are taken by one rank, in rank order, and then handed out, so that they are bitwise equal on
all ranks; half types are summed in fp32. (For the all-reduce see `all_reduce.py`.)
A rank of a group of k receives, of a tensor of b bytes in equal pieces,

    all_gather       b (k-1)/k      every piece broadcast straight into its place
    reduce_scatter   b (k-1)/k      the pieces swapped, then summed by their owners
    all_to_all       b (k-1)/k^2    the intersections of old and new pieces swapped
    broadcast        b              but the root

and exactly its part for unequal ones. (gloo's own all-gather refuses unequal pieces, and its
reduce-scatter is one all-reduce for each rank.)

Ranks of one host that share memory (`Group.staging`) stage every piece once instead, where the
others read it; sums, counts and results are the same. What these functions do themselves is the
way through torch's communicators.

In all of them x is this rank's tensor, of the dtype and rank of the result on every rank. All ranks
of a group call the same collectives in one order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.comm.groups.group import Group, GroupCall
from workbench.comm.messages.flat import added, cut, lengths, pack, resized, shaped, unpack
from workbench.comm.messages.recorder import StepPhase
from workbench.comm.shared_memory import collectives as shared
from workbench.plan.placement.placement import Shard


@torch.no_grad()
def all_gather(
    x: Tensor, shard: Shard, group: Group, *, layer: str = "", phase: StepPhase = "step"
) -> Tensor:
    """Returns, on every rank, the whole tensor of which x is this rank's piece.

    Args:
        x: this rank's piece [..., shard.sizes[rank], ...].
        shard: how the tensor is cut over the group.
        group: the ranks that hold its pieces.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: `shard` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else.
    """
    _check(x, shard, group, whole=False)
    shape = resized(x.shape, shard.dim, shard.extent)
    owned = lengths(shape, shard.dim, shard.sizes)
    call = group.call("all_gather", layer, phase)
    staging = group.staging_on(x.device)
    with call.timed():
        if staging is not None:
            call.count(owned, x.itemsize)
            return shared.all_gather(x, shard, staging, call)
        flat = x.new_empty(sum(owned))
        cut(flat, owned)[group.rank].view(x.shape).copy_(x)
        _spread(flat, owned, call)
        return unpack(flat, shape, shard.dim, shard.sizes)


@torch.no_grad()
def reduce_scatter(
    x: Tensor, shard: Shard, group: Group, *, layer: str = "", phase: StepPhase = "step"
) -> Tensor:
    """Returns this rank's piece of the sum of all ranks' x.

    Args:
        x: this rank's summand [..., shard.extent, ...].
        shard: how the sum is cut over the group.
        group: the ranks that sum.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: `shard` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else.
    """
    _check(x, shard, group, whole=True)
    shape = resized(x.shape, shard.dim, shard.sizes[group.rank])
    sent = lengths(x.shape, shard.dim, shard.sizes)
    call = group.call("reduce_scatter", layer, phase)
    staging = group.staging_on(x.device)
    with call.timed():
        if staging is not None:
            call.count([sent[group.rank]] * group.size, x.itemsize, adds=True)
            return shared.reduce_scatter(x, shard, staging, call)
        flat = pack(x, shard.dim, shard.sizes)
        arrived = _swap(flat, sent, [sent[group.rank]] * group.size, call, adds=True)
        if group.size > 1:
            arrived = added(list(arrived.view(group.size, sent[group.rank])))
        return shaped(arrived, shape)


@torch.no_grad()
def all_to_all(
    x: Tensor,
    source: Shard,
    target: Shard,
    group: Group,
    *,
    layer: str = "",
    phase: StepPhase = "step",
) -> Tensor:
    """Turns x, this rank's piece of a tensor cut by `source`, into its piece by `target`.

    Args:
        x: this rank's piece [..., source.sizes[rank], ...].
        source: how the tensor is cut over the group.
        target: how it is to be cut, along this or another dimension.
        group: the ranks that hold its pieces.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: `source` or `target` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else.
    """
    _check(x, source, group, whole=False)
    sends: Sequence[int]
    receives: Sequence[int]
    if source.dim == target.dim:
        sends, receives = _overlaps(source, target, group)
    else:
        _check(x, target, group, whole=True)
        sends, receives = target.sizes, source.sizes
    shape = resized(x.shape, target.dim, target.sizes[group.rank])
    shape = resized(shape, source.dim, sum(receives))
    sent = lengths(x.shape, target.dim, sends)
    received = lengths(shape, source.dim, receives)
    call = group.call("all_to_all", layer, phase)
    staging = group.staging_on(x.device)
    with call.timed():
        if staging is not None:
            call.count(received, x.itemsize)
            return shared.all_to_all(x, source, target, staging, call)
        flat = _swap(pack(x, target.dim, sends), sent, received, call)
        return unpack(flat, shape, source.dim, receives)


@torch.no_grad()
def all_to_all_v(
    flat: Tensor,
    sizes: Sequence[Sequence[int]],
    group: Group,
    *,
    layer: str = "",
    phase: StepPhase = "step",
) -> tuple[Tensor, ...]:
    """Sends each rank its part of `flat`; returns what came from each, in rank order.

    Args:
        flat: what this rank sends [sum(sizes[rank])], one rank's part after the other's;
            contiguous.
        sizes: the number of elements that go from rank s to rank t, as `sizes[s][t]`; the same on
            all ranks.
        group: the ranks that exchange.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: `flat` is not as long as this rank's row of `sizes`, or there is not one row and
            one column for each rank.
        CommError: other ranks did not come, or came for something else.
    """
    if len(sizes) != group.size or any(len(row) != group.size for row in sizes):
        raise ValueError(f"{group} needs {group.size} x {group.size} sizes, got {sizes}")
    sent, received = sizes[group.rank], [row[group.rank] for row in sizes]
    if flat.dim() != 1 or len(flat) != sum(sent):
        raise ValueError(f"{group} sends {sum(sent)} elements, got shape {tuple(flat.shape)}")
    call = group.call("all_to_all", layer, phase)
    staging = group.staging_on(flat.device)
    with call.timed():
        if staging is not None:
            call.count(received, flat.itemsize)
            arrived = shared.all_to_all_v(flat, sizes, staging, call)
        else:
            arrived = _swap(flat, sent, received, call)
        return cut(arrived, received)


@torch.no_grad()
def broadcast(
    x: Tensor, root: int, group: Group, *, layer: str = "", phase: StepPhase = "step"
) -> Tensor:
    """Returns a copy of one rank's x on every rank.

    Args:
        x: what is sent; on the other ranks a tensor of its shape and dtype.
        root: the index in the group of the rank that sends.
        group: the ranks that receive, and the one that sends.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: `root` is no index of the group.
        CommError: other ranks did not come, or came for something else.
    """
    if not 0 <= root < group.size:
        raise ValueError(
            f"the root of a broadcast in {group} must be one of 0..{group.size - 1}, got {root}"
        )
    call = group.call("broadcast", layer, phase)
    staging = group.staging_on(x.device)
    with call.timed():
        if staging is not None:
            owned = [x.numel() if rank == root else 0 for rank in range(group.size)]
            call.count(owned, x.itemsize)
            return shared.broadcast(x, root, staging, call)
        flat = x.reshape(-1).clone() if group.rank == root else x.new_empty(x.numel())
        _spread(flat, [len(flat) if rank == root else 0 for rank in range(group.size)], call)
        return shaped(flat, x.shape)


def _swap(
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    call: GroupCall,
    *,
    adds: bool = False,
) -> Tensor:
    """Sends each rank consecutive elements of `flat`; returns what came, in rank order.

    Args:
        flat: what this rank sends [sum(sent)].
    """
    link = call.group.link
    if link is None:
        return flat.clone()
    call.count(received, flat.itemsize, adds=adds)
    outgoing = flat.to(link.device)
    incoming = outgoing.new_empty(sum(received))
    work = link.begin(
        dist.all_to_all_single(
            incoming, outgoing, list(received), list(sent), link.process_group, async_op=True
        )
    )
    link.wait([work], call)
    return incoming.to(flat.device)


def _spread(flat: Tensor, owned: Sequence[int], call: GroupCall) -> None:
    """Fills `flat` on all ranks, of which rank r brings `owned[r]` consecutive elements.

    One broadcast for each piece, all under way at once: gloo's all-gather would want pieces of
    one length, and its all-to-all the own piece once for every receiver.
    """
    group, link = call.group, call.group.link
    if link is None:
        return
    call.count(owned, flat.itemsize)
    travelling = flat.to(link.device)
    works = [
        link.begin(dist.broadcast(part, group.ranks[root], link.process_group, async_op=True))
        for root, part in enumerate(cut(travelling, owned))
        if len(part) > 0
    ]
    link.wait(works, call)
    if travelling is not flat:
        flat.copy_(travelling)


def _overlaps(source: Shard, target: Shard, group: Group) -> tuple[list[int], list[int]]:
    """What this rank sends to and receives from each rank when one dimension is resharded."""
    if source.extent != target.extent or len(target.sizes) != group.size:
        raise ValueError(f"cannot turn {source} into {target} on {group}")
    sends = [_overlap(source.span(group.rank), target.span(r)) for r in range(group.size)]
    receives = [_overlap(source.span(r), target.span(group.rank)) for r in range(group.size)]
    return sends, receives


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    """Returns the number of elements that two (start, length) spans share."""
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
