"""What each rank receives in one call of a collective: messages and bytes, for all groups.

A rank of a group receives

    all_gather       the pieces of the others
    reduce_scatter   its own piece from each of the others
    all_to_all       from each of the others its part of the new piece

and a message for each of these that is not empty. An all-reduce is

    waited for     a layer's own: "auto", in portions of 4 MiB where it is hierarchical
    started        a bucket's: the algorithm that is asked for, all of it at once

The algorithm that "auto" means is decided by the function that the ranks use
(`plan/experiment/sync.py`); what each one moves is in `collective_costs.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from workbench.plan.collective.algorithm import Algorithm, chosen
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.extension.user_object import Own
from workbench.plan.placement.placement import ROWS, Shard, shard_groups
from workbench.predict.traffic.collective_costs import (
    FLAT,
    Costs,
    Part,
    Sender,
    add_exchanged,
    add_gathered,
    add_scattered,
    add_served,
    add_summed,
    direct,
    hierarchical,
    ring,
    taken,
)
from workbench.program.collectives import CollectiveCall, Exchange, Summed
from workbench.program.rows import Counts, Groups, HostLayout


@dataclass(frozen=True)
class Received:
    """What each rank of the world receives in one call.

    Attributes:
        messages: non-empty messages from others [ranks].
        bytes: bytes of these messages [ranks].
        senders: functions that add the bytes of each pair of ranks to a table.
    """

    messages: Counts
    bytes: Counts
    senders: tuple[Sender, ...] = ()


def all_gather(pieces: Counts, groups: Groups) -> Received:
    """The bytes and messages of an all-gather of pieces of so many bytes [ranks]."""
    members = np.asarray(groups)
    held = pieces[members]
    messages, received = np.zeros_like(pieces), np.zeros_like(pieces)
    messages[members] = (held > 0).sum(axis=1, keepdims=True) - (held > 0)
    received[members] = held.sum(axis=1, keepdims=True) - held
    return Received(messages, received, (partial(add_gathered, pieces, groups),))


def reduce_scatter(pieces: Counts, groups: Groups) -> Received:
    """The bytes and messages of a reduce-scatter into pieces of so many bytes [ranks]."""
    others = len(groups[0]) - 1
    senders = (partial(add_scattered, pieces, groups),)
    return Received((pieces > 0) * others, pieces * others, senders)


def all_to_all(slabs: Counts, source: Shard, target: Shard, groups: Groups) -> Received:
    """The bytes and messages of an all-to-all from one sharding to another.

    Args:
        slabs: bytes of the group's tensor for one index of each sharded dimension, on each rank
            [ranks].
        source: the sharding before, over one group's ranks.
        target: the sharding after, over the same ranks.
        groups: the groups, which are all sharded alike.
    """
    messages, received = np.zeros_like(slabs), np.zeros_like(slabs)
    for members in groups:
        for place, rank in enumerate(members):
            others = [taken(source, target, sender, place) for sender in range(len(members))]
            sizes = [n * int(slabs[rank]) for r, n in enumerate(others) if r != place]
            messages[rank] = sum(size > 0 for size in sizes)
            received[rank] = sum(sizes)
    senders = (partial(add_exchanged, slabs, source, target, groups),)
    return Received(messages, received, senders)


PORTION_BYTES = 2**22
# Portions of one sum: no more than this, however large they get.
MOST_PORTIONS = 1024
_WIDE = 4

# The parts of an all-reduce of (elements, bytes of one, ranks on each host of the group).
_Parts = Callable[[int, int, tuple[int, ...]], tuple[Part, ...]]


class Summing:
    """The bytes and messages of all-reduces on ranks of these hosts, without GPUs."""

    def __init__(self, hosts: HostLayout) -> None:
        self.hosts = hosts
        self._known: dict[tuple[object, ...], Costs] = {}

    def waited_for(self, numel: Counts, groups: Groups, itemsize: int) -> Received:
        """A blocking all-reduce of so many elements [ranks], equal within a group."""
        return self._received(numel, groups, itemsize, _waited_for)

    def started(
        self,
        numel: Counts,
        groups: Groups,
        itemsize: int,
        algorithm: Algorithm,
        *,
        buffer: bool,
        codec: AnyCodec | None = None,
    ) -> Received:
        """An all-reduce that is started beside computation.

        Args:
            numel: the elements that each rank contributes [ranks].
            groups: the groups whose ranks reduce together.
            itemsize: bytes of an element.
            algorithm: the algorithm that is asked for.
            buffer: whether the elements are in a buffer made for them, shared where ranks share
                memory.
            codec: the codec that compresses what is sent, if any.
        """
        parts = partial(_started, algorithm, buffer, codec)
        return self._received(numel, groups, itemsize, parts, (algorithm, buffer, codec))

    def _received(
        self, numel: Counts, groups: Groups, itemsize: int, parts: _Parts, key: object = None
    ) -> Received:
        messages, received = np.zeros_like(numel), np.zeros_like(numel)
        members = np.asarray(groups)
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        lengths = numel[members[:, 0]].tolist()
        for index, found in enumerate(zip(lengths, self.hosts.over(groups), strict=True)):
            alike.setdefault(found, []).append(index)
        senders: list[Sender] = []
        for (length, hosts), which in alike.items():
            name = key, length, itemsize, hosts
            summed = parts(length, itemsize, hosts)
            if name not in self._known:
                self._known[name] = _costs(summed, hosts)
            costs = self._known[name]
            messages[members[which]] = costs.messages
            received[members[which]] = costs.bytes
            senders.append(partial(add_summed, summed, hosts, members[which]))
        return Received(messages, received, tuple(senders))


def _waited_for(length: int, itemsize: int, hosts: tuple[int, ...]) -> tuple[Part, ...]:
    nbytes = length * itemsize
    name = chosen("auto", hosts, "gloo", nbytes, beside=False)
    if name != "hierarchical":
        return (_part(name, length, itemsize),)
    portion = max(1, PORTION_BYTES // itemsize, -(-length // MOST_PORTIONS))
    full, rest = divmod(length, portion)
    return _part(name, rest, itemsize), _part(name, portion, itemsize, times=full)


def _started(
    algorithm: Algorithm,
    buffer: bool,
    codec: AnyCodec | None,
    length: int,
    itemsize: int,
    hosts: tuple[int, ...],
) -> tuple[Part, ...]:
    name = started_as(algorithm, buffer, codec, length * itemsize, hosts)
    return (_part(name, length, itemsize, codec),)


def started_as(
    algorithm: Algorithm, buffer: bool, codec: AnyCodec | None, nbytes: int, hosts: tuple[int, ...]
) -> Algorithm:
    """The algorithm that a started all-reduce uses on a group of ranks on these hosts."""
    beside = not buffer or len(hosts) == sum(hosts)  # ranks that share no memory share no buffers
    coded = "" if codec is None else codec.name
    return chosen(algorithm, hosts, "gloo", nbytes, beside=beside, codec=coded)


def _part(
    name: Algorithm, length: int, itemsize: int, codec: AnyCodec | None = None, times: int = 1
) -> Part:
    """One part of an all-reduce.

    The backend does not tell what it sends: the recorder counts a direct one, in no half type.
    """
    if name == "backend":
        return Part("direct", length, max(itemsize, _WIDE), None, times)
    return Part(name, length, itemsize, codec, times)


def _costs(parts: tuple[Part, ...], hosts: tuple[int, ...]) -> Costs:
    found = Costs.none(sum(hosts))
    for part in parts:
        name, length, itemsize, codec, times = part
        if sum(hosts) == 1:
            continue
        if isinstance(name, Own):
            costs = Costs.of(part.dry(name, sum(hosts)))
        elif name == "hierarchical":
            costs = hierarchical(length, itemsize, hosts, codec).both
        elif codec is not None:
            costs = (ring if name == "ring" else direct)(length, itemsize, sum(hosts), codec)
        else:
            costs = FLAT[name](length, itemsize, sum(hosts))
        found = found + costs.times(times)
    return found


def received_of(call: CollectiveCall, summing: Summing) -> Received:
    """Messages and bytes that one call brings to each rank, as if all took part.

    Args:
        call: the call, on all ranks.
        summing: the all-reduces on these ranks.
    """
    numel, width = call.numel, call.itemsize
    if isinstance(call.how, Exchange):
        return _exchanged(call.how, width)
    groups = call.groups(len(numel))
    match call.op:
        case "all_gather":
            return all_gather(numel * width, groups)
        case "reduce_scatter":
            return reduce_scatter(numel * width, groups)
        case "all_reduce" if isinstance(call.how, Summed):
            algorithm, buffer, codec = call.how
            return summing.started(numel, groups, width, algorithm, buffer=buffer, codec=codec)
        case "all_reduce":
            return summing.waited_for(numel, groups, width)
        case _:
            return _rooted(call)


def _rooted(call: CollectiveCall) -> Received:
    """Gradients that the server of each piece receives, or its weights that all others do."""
    assert call.server is not None
    groups = call.groups(len(call.numel))
    there = np.ones_like(call.numel) if call.takes is None else call.takes
    serves, size = (call.server > 0) & (there > 0), call.numel * call.itemsize
    up = call.op == "reduce"
    often = (len(groups[0]) - 1) * serves if up else there * ~serves
    return Received(often, often * size, (partial(add_served, serves, size, groups, up=up),))


def _exchanged(exchange: Exchange, itemsize: int) -> Received:
    """The bytes and messages of an all-to-all whose groups differ in their rows."""
    step, rows = exchange.step, exchange.rows
    messages, bytes_ = np.zeros_like(rows.own), np.zeros_like(rows.own)
    senders: tuple[Sender, ...] = ()
    for members in shard_groups(step.group_size, rows.world_size):
        own = Shard(0, tuple(int(rows.own[rank]) * step.rows for rank in members))
        ends = (exchange.source, exchange.target)
        before, after = (own if layout == ROWS else layout.placement for layout in ends)
        assert isinstance(before, Shard)
        assert isinstance(after, Shard)
        lengths = (own.extent, *step.shape)
        rest = math.prod(n for d, n in enumerate(lengths) if d not in (before.dim, after.dim))
        slabs = np.full_like(rows.own, rest * itemsize)
        got = all_to_all(slabs, before, after, [members])
        messages, bytes_ = messages + got.messages, bytes_ + got.bytes
        senders += got.senders
    return Received(messages, bytes_, senders)
