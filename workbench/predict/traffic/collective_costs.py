"""The traffic of each all-reduce algorithm, by formula, for every rank and every pair of ranks.

With b bytes, k ranks, m hosts of n ranks each, and everything divisible, a rank receives

    direct              2 b (k-1)/k            in 2 rounds
    ring                2 b (k-1)/k            in 2 (k-1) rounds
    halving_doubling    2 b (k-1)/k            in 2 log2(k) rounds, k a power of two
    hierarchical        2 b (n-1)/n            in 2 rounds within its host, and
                        2 b (m-1)/(m n)        over its wire, in 2 rounds; of two hosts in 1

and the functions here say what it is where nothing divides: of `length` elements in k segments
the first `length mod k` are longer by one. They are derived from the algorithms' descriptions, not
from their code, which is tested against them. What an algorithm of a person's own exchanges is
found by running it without data (`plan/collective/algorithm.py`).

Sources: direct, halving-doubling: Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521, on pairwise exchange and on Rabenseifner's algorithm; ring:
Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, whose lower bound 2 b (k-1)/k is; two
levels: Goyal et al. 2017, arXiv:1706.02677, sec. 4.1.

For each pair of ranks, a `Sender` adds to a table [receiver, sender] of the world what one call
brings, scaled by `times` for each receiver:

    all_gather       from each of the others its piece
    reduce_scatter   from each of the others as much as the own piece
    all_to_all       from each of the others its part of the own new piece
    direct           from each of the others a part of the own segment, and then theirs whole
    ring             everything from the rank before
    halving-doubling from the rank at each distance the kept half, and later the other half
    hierarchical     direct within each host, and of each stripe from its owners on other hosts
    reduce, broadcast    from all to the server, and from it to all

Each row of such a table adds up to what the formula says that the rank receives.

A message is received for each of these that is not empty. An all-reduce is

    waited for     a layer's own: "auto", in portions of 4 MiB where it is hierarchical
    started        a bucket's: the algorithm that is asked for, all of it at once

The algorithm that "auto" means is decided by the function that the ranks use
(`plan/experiment/sync.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.plan.collective.algorithm import Algorithm, DryRun, chosen, dry_run
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.extension.user_object import Own
from workbench.plan.placement.placement import ROWS, Shard, shard_groups
from workbench.program.collectives import CollectiveCall, Exchange, Summed
from workbench.program.rows import Counts, Groups, HostLayout


@dataclass(frozen=True)
class Cost:
    """The cost of one all-reduce on one rank.

    Attributes:
        bytes: the bytes of these messages.
        rounds: successive exchanges in which the rank takes part. The all-reduce takes as many as
            the rank with most.
    """

    messages: int = 0
    bytes: int = 0
    rounds: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.messages + other.messages, self.bytes + other.bytes, self.rounds + other.rounds
        )


@dataclass(frozen=True)
class Costs:
    """The cost of one all-reduce on all ranks [ranks each]."""

    messages: Counts
    bytes: Counts
    rounds: Counts

    @classmethod
    def of(cls, dry: DryRun) -> "Costs":
        """The cost of an all-reduce that was run dry."""
        counts = dry.messages, dry.bytes, dry.rounds
        return cls(*(np.array(each, dtype=np.int64) for each in counts))

    @classmethod
    def none(cls, ranks: int) -> "Costs":
        """The cost of doing nothing, on so many ranks."""
        return cls(*(np.zeros(ranks, dtype=np.int64) for _ in range(3)))

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            self.messages + other.messages, self.bytes + other.bytes, self.rounds + other.rounds
        )

    def times(self, count: int) -> "Costs":
        """The cost of so many all-reduces."""
        return Costs(self.messages * count, self.bytes * count, self.rounds * count)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, rank: int) -> Cost:
        return Cost(int(self.messages[rank]), int(self.bytes[rank]), int(self.rounds[rank]))

    def __iter__(self) -> Iterator[Cost]:
        return (self[rank] for rank in range(len(self)))


@dataclass(frozen=True)
class TwoLevelCosts:
    """The cost of a hierarchical all-reduce on each rank.

    Attributes:
        across: the cost between hosts, over the network.
    """

    within: Costs
    across: Costs

    @property
    def both(self) -> Costs:
        """The sum of both levels."""
        return self.within + self.across


def direct(length: int, itemsize: int, ranks: int, codec: AnyCodec | None = None) -> Costs:
    """Every rank sends every other a segment, twice; with a codec, its encoding."""
    if ranks == 1:
        return Costs.none(1)
    own = segments(length, ranks)
    messages = (ranks - 1) * (own > 0) + min(length, ranks) - (own > 0)
    sizes = encoded(own, itemsize, codec)
    return Costs(messages, (ranks - 2) * sizes + sizes.sum(), np.full_like(own, 2))


def ring(length: int, itemsize: int, ranks: int, codec: AnyCodec | None = None) -> Costs:
    """A ring: in each of its two phases a rank receives all segments but one.

    In the reduce-scatter the missing segment is the one that it sends first, its predecessor's; in
    the all-gather it is the one that it has reduced, its own.
    """
    if ranks == 1:
        return Costs.none(1)
    own = segments(length, ranks)
    before = np.roll(own, 1)
    messages = 2 * min(length, ranks) - (own > 0) - (before > 0)
    sizes = encoded(own, itemsize, codec)
    received = 2 * sizes.sum() - sizes - np.roll(sizes, 1)
    return Costs(messages, received, np.full_like(own, 2 * (ranks - 1)))


def halving_doubling(length: int, itemsize: int, ranks: int) -> Costs:
    """The cost of halving-doubling: at log2(p) distances a rank receives its half, twice.

    Of the blocks of `distance` segments that is its own one, then its neighbour's. Each of the
    ranks beyond p, the largest power of two, sends its tensor to one of the p, and receives the
    sum.
    """
    power = 2 ** (ranks.bit_length() - 1)
    levels = power.bit_length() - 1
    costs, rank = Costs.none(ranks), np.arange(power)
    for distance in (2**level for level in range(levels)):
        for number in (rank // distance, rank // distance ^ 1):
            begin, end = (_starts(length, power, n * distance) for n in (number, number + 1))
            costs.messages[:power] += end > begin
            costs.bytes[:power] += (end - begin) * itemsize
            costs.rounds[:power] += 1
    for folded in (slice(0, ranks - power), slice(power, ranks)):
        costs.messages[folded] += length > 0
        costs.bytes[folded] += length * itemsize
        costs.rounds[folded] += 2
    return costs


def hierarchical(
    length: int, itemsize: int, hosts: Sequence[int], codec: AnyCodec | None = None
) -> TwoLevelCosts:
    """The cost of an all-reduce that is direct within each host, and per stripe across hosts.

    Args:
        length: the number of elements.
        itemsize: the bytes of an element.
        codec: the codec that compresses what hosts send each other, if any.

    Returns:
        The costs of all ranks of the first host, then of the second, and so on.
    """
    within, across = Costs.none(sum(hosts)), Costs.none(sum(hosts))
    ends = {end for ranks in set(hosts) for end in _ends(length, ranks)}
    stripes = list(pairwise(sorted({0, *ends})))
    first = np.cumsum([0, *hosts[:-1]])
    for ranks in set(hosts):
        here = np.flatnonzero(np.asarray(hosts) == ranks)
        inside = direct(length, itemsize, ranks)
        for rank, (begin, end) in enumerate(pairwise((0, *_ends(length, ranks)))):
            places = first[here] + rank
            for total, more in zip(_sums(within), _sums(inside), strict=True):
                total[places] = more[rank]
            for start, stop in stripes:
                if begin <= start < end:
                    moved = _across(stop - start, itemsize, len(hosts), codec)
                    across.messages[places] += moved.messages[here]
                    across.bytes[places] += moved.bytes[here]
                    across.rounds[places] = moved.rounds[here]  # stripes go side by side
    return TwoLevelCosts(within, across)


FLAT: Mapping[str, Callable[[int, int, int], Costs]] = MappingProxyType(
    {"direct": direct, "ring": ring, "halving_doubling": halving_doubling}
)
"""The algorithms that know no hosts: of (length, itemsize, ranks), the cost of each rank."""


def encoded(lengths: Counts, itemsize: int, codec: AnyCodec | None) -> Counts:
    """Bytes of pieces of so many elements, each encoded by itself; None: not encoded."""
    if codec is None:
        return lengths * itemsize
    found, place = np.unique(lengths, return_inverse=True)
    sizes = [codec.encoded_bytes(length) for length in found.tolist()]
    return np.array(sizes, dtype=np.int64)[place]


def _across(length: int, itemsize: int, hosts: int, codec: AnyCodec | None) -> Costs:
    if hosts == 2:
        one = np.ones(2, dtype=np.int64)
        return Costs(one * (length > 0), encoded(one * length, itemsize, codec), one)
    return direct(length, itemsize, hosts, codec)


def segments(length: int, count: int) -> Counts:
    """The elements of each of `count` near-equal segments [count]."""
    return length // count + (np.arange(count) < length % count)


def _starts(length: int, count: int, index: Counts) -> Counts:
    """The first element of the segments of these indices."""
    return index * (length // count) + np.minimum(index, length % count)


def _ends(length: int, count: int) -> tuple[int, ...]:
    """The end of each segment, excluded."""
    return tuple(np.cumsum(segments(length, count)).tolist())


def _sums(costs: Costs) -> tuple[Counts, Counts, Counts]:
    return costs.messages, costs.bytes, costs.rounds


Table = NDArray[np.int64]
Sender = Callable[[Table, Counts], None]


class Part(NamedTuple):
    """Equal all-reduces.

    Attributes:
        length: the number of elements.
        itemsize: the bytes of an element.
        codec: the codec that they are compressed with, if any.
    """

    name: Algorithm
    length: int
    itemsize: int
    codec: AnyCodec | None
    times: int

    def dry(self, own: Own, ranks: int) -> DryRun:
        """What one of them exchanges on so many ranks, by an algorithm of a person's own."""
        return dry_run(own, self.length, self.itemsize, ranks, self.codec)


def add_gathered(pieces: Counts, groups: Groups, table: Table, times: Counts) -> None:
    """Adds an all-gather of pieces of so many bytes on each rank [ranks]."""
    for members in map(list, groups):
        _add(np.tile(pieces[members], (len(members), 1)), members, table, times)


def add_scattered(pieces: Counts, groups: Groups, table: Table, times: Counts) -> None:
    """Adds a reduce-scatter into pieces of so many bytes on each rank [ranks]."""
    for members in map(list, groups):
        _add(np.tile(pieces[members][:, None], (1, len(members))), members, table, times)


def add_exchanged(
    slabs: Counts, source: Shard, target: Shard, groups: Groups, table: Table, times: Counts
) -> None:
    """Adds an all-to-all; see `received.all_to_all`."""
    for members in map(list, groups):
        size = range(len(members))
        common = np.array(
            [[taken(source, target, sender, receiver) for sender in size] for receiver in size]
        )
        _add(common * slabs[members][:, None], members, table, times)


def add_served(
    serves: NDArray[np.bool_],
    bytes_: Counts,
    groups: Groups,
    table: Table,
    times: Counts,
    *,
    up: bool,
) -> None:
    """Adds gradients of so many bytes [ranks] to the servers, or weights back from them."""
    for members in map(list, groups):
        here = serves[members]
        takes = here[:, None] & ~here if up else ~here[:, None] & here
        _add(takes * bytes_[members][:, None], members, table, times)


def add_summed(
    parts: Sequence[Part], hosts: tuple[int, ...], members: Table, table: Table, times: Counts
) -> None:
    """Adds all-reduces on groups [groups, ranks] that are all on hosts in this way."""
    block = sum((summed(part, hosts) * part.times for part in parts), np.zeros((1, 1), np.int64))
    for own in members.tolist():
        _add(block, own, table, times)


def summed(part: Part, hosts: Sequence[int]) -> Table:
    """Bytes of one all-reduce for each pair of a group's ranks [receiver, sender].

    Args:
        hosts: how many of the group's ranks each host has [hosts].
    """
    ranks = sum(hosts)
    if isinstance(part.name, Own) and ranks > 1:
        return np.array(part.dry(part.name, ranks).pairs, dtype=np.int64)
    match part.name:
        case "ring":
            return _ring(part, ranks)
        case "halving_doubling":
            return _halving_doubling(part, ranks)
        case "hierarchical":
            return _hierarchical(part, hosts)
        case _:
            return _direct(part.length, part.itemsize, ranks, part.codec)


def taken(source: Shard, target: Shard, sender: int, receiver: int) -> int:
    """How many indices of the sharded dimensions two pieces, before and after, have in common."""
    if source.dim != target.dim:
        return source.sizes[sender] * target.sizes[receiver]
    (begin, length), (other, size) = source.span(sender), target.span(receiver)
    return max(0, min(begin + length, other + size) - max(begin, other))


def _add(block: Table, members: list[int], table: Table, times: Counts) -> None:
    """Adds the bytes of a group's members, none of them from a rank to itself."""
    found = block * times[members][:, None]
    np.fill_diagonal(found, 0)
    table[np.ix_(members, members)] += found


def _direct(length: int, itemsize: int, ranks: int, codec: AnyCodec | None) -> Table:
    own = encoded(segments(length, ranks), itemsize, codec)
    found: Table = own[:, None] + own[None, :]
    np.fill_diagonal(found, 0)
    return found


def _ring(part: Part, ranks: int) -> Table:
    found = np.zeros((ranks, ranks), dtype=np.int64)
    if ranks > 1:
        sizes = encoded(segments(part.length, ranks), part.itemsize, part.codec)
        before = (np.arange(ranks) - 1) % ranks
        found[np.arange(ranks), before] = 2 * sizes.sum() - sizes - sizes[before]
    return found


def _halving_doubling(part: Part, ranks: int) -> Table:
    found = np.zeros((ranks, ranks), dtype=np.int64)
    power = 2 ** (ranks.bit_length() - 1)
    ends = np.concatenate([[0], np.cumsum(segments(part.length, power))]) * part.itemsize
    rank = np.arange(power)
    for distance in (2**level for level in range(power.bit_length() - 1)):
        for number in (rank // distance, rank // distance ^ 1):
            sizes = ends[(number + 1) * distance] - ends[number * distance]
            found[rank, rank ^ distance] += sizes
    folded = np.arange(power, ranks)
    found[folded, folded - power] = found[folded - power, folded] = part.length * part.itemsize
    return found


def _hierarchical(part: Part, hosts: Sequence[int]) -> Table:
    found = np.zeros((sum(hosts), sum(hosts)), dtype=np.int64)
    first = np.cumsum([0, *hosts[:-1]])
    ends = [np.cumsum(segments(part.length, ranks)) for ranks in hosts]
    for start, ranks in zip(first, hosts, strict=True):
        here = slice(start, start + ranks)
        found[here, here] = _direct(part.length, part.itemsize, ranks, None)
    cuts = sorted({0, *(int(end) for own in ends for end in own)})
    for begin, end in pairwise(cuts):
        owners = [
            int(start + np.searchsorted(own, begin, side="right"))
            for start, own in zip(first, ends, strict=True)
        ]
        moved = _senders_across(end - begin, part.itemsize, len(hosts), part.codec)
        found[np.ix_(owners, owners)] += moved
    return found


def _senders_across(length: int, itemsize: int, hosts: int, codec: AnyCodec | None) -> Table:
    """Bytes for each pair of hosts: two hosts swap everything at once; more do it directly."""
    if hosts == 2:
        (size,) = encoded(np.array([length]), itemsize, codec)
        return np.array([[0, size], [size, 0]], dtype=np.int64)
    return _direct(length, itemsize, hosts, codec)


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
            itemsize: bytes of an element.
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
    """Messages and bytes that one call brings to each rank, as if all took part."""
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
