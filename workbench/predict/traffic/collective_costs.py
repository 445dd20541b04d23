"""What each all-reduce algorithm moves: messages, bytes and rounds of every rank, by formula.

With b bytes, k ranks, m hosts of n ranks each, and everything divisible, a rank receives

    direct              2 b (k-1)/k            in 2 rounds
    ring                2 b (k-1)/k            in 2 (k-1) rounds
    halving_doubling    2 b (k-1)/k            in 2 log2(k) rounds, k a power of two
    hierarchical        2 b (n-1)/n            in 2 rounds within its host, and
                        2 b (m-1)/(m n)        over its wire, in 2 rounds; of two hosts in 1

and the functions here say what it is where nothing divides: of `length` elements in k segments
the first `length mod k` are longer by one. They are derived from the algorithms' descriptions, not
from their code, which is held against them.

Sources: direct, halving-doubling: Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521, on pairwise exchange and on Rabenseifner's algorithm; ring:
Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, whose lower bound 2 b (k-1)/k is; two
levels: Goyal et al. 2017, arXiv:1706.02677, sec. 4.1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from workbench.plan.codec import Codec
from workbench.program.rows import Counts


@dataclass(frozen=True)
class Cost:
    """What one rank has to do with one all-reduce.

    Attributes:
        messages: non-empty ones that it receives.
        bytes: of those.
        rounds: exchanges that follow each other, in which it takes part. The all-reduce takes as
            many as the rank with most.
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
    """The same of all ranks, of which there may be very many: a number for each rank."""

    messages: Counts
    bytes: Counts
    rounds: Counts

    @classmethod
    def none(cls, ranks: int) -> "Costs":
        """Of ranks that have nothing to do."""
        return cls(*(np.zeros(ranks, dtype=np.int64) for _ in range(3)))

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            self.messages + other.messages, self.bytes + other.bytes, self.rounds + other.rounds
        )

    def times(self, count: int) -> "Costs":
        """Of so many all-reduces."""
        return Costs(self.messages * count, self.bytes * count, self.rounds * count)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, rank: int) -> Cost:
        return Cost(int(self.messages[rank]), int(self.bytes[rank]), int(self.rounds[rank]))

    def __iter__(self) -> Iterator[Cost]:
        return (self[rank] for rank in range(len(self)))


@dataclass(frozen=True)
class TwoLevelCosts:
    """What each rank has to do with a hierarchical all-reduce.

    Attributes:
        within: through its host's memory.
        across: over the wire.
    """

    within: Costs
    across: Costs

    @property
    def both(self) -> Costs:
        """Their sum."""
        return self.within + self.across


def direct(length: int, itemsize: int, ranks: int, codec: Codec | None = None) -> Costs:
    """Everybody sends everybody a segment, twice; of coded ones its encoding."""
    if ranks == 1:
        return Costs.none(1)
    own = segments(length, ranks)
    messages = (ranks - 1) * (own > 0) + min(length, ranks) - (own > 0)
    sizes = encoded(own, itemsize, codec)
    return Costs(messages, (ranks - 2) * sizes + sizes.sum(), np.full_like(own, 2))


def ring(length: int, itemsize: int, ranks: int, codec: Codec | None = None) -> Costs:
    """In each of the two turns a rank receives all segments but one.

    In the first that is the one that it passes on first, of the rank before it; in the second
    the one that it has added up, its own.
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
    """At each of log2(p) distances a rank receives what it keeps, and later what it gave away.

    Of the blocks of `distance` segments that is its own one, then its neighbour's. Each of the
    ranks beyond p, the largest power of two, brings its tensor to one of the p, and fetches the
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
    length: int, itemsize: int, hosts: Sequence[int], codec: Codec | None = None
) -> TwoLevelCosts:
    """Direct within each host; then, of each stripe, among those who own it on their hosts.

    Args:
        length: in elements.
        itemsize: in bytes.
        hosts: how many ranks each has.
        codec: of what goes from host to host.

    Returns:
        Of all ranks of the first host, then of the second, and so on.
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


def encoded(lengths: Counts, itemsize: int, codec: Codec | None) -> Counts:
    """Bytes of pieces of so many elements, each encoded by itself; None: as they are."""
    if codec is None:
        return lengths * itemsize
    found, place = np.unique(lengths, return_inverse=True)
    sizes = [codec.encoded_bytes(length) for length in found.tolist()]
    return np.array(sizes, dtype=np.int64)[place]


def _across(length: int, itemsize: int, hosts: int, codec: Codec | None) -> Costs:
    if hosts == 2:
        one = np.ones(2, dtype=np.int64)
        return Costs(one * (length > 0), encoded(one * length, itemsize, codec), one)
    return direct(length, itemsize, hosts, codec)


def segments(length: int, count: int) -> Counts:
    """Elements of each of `count` near-equal segments."""
    return length // count + (np.arange(count) < length % count)


def _starts(length: int, count: int, index: Counts) -> Counts:
    """Where the segments of these indices begin."""
    return index * (length // count) + np.minimum(index, length % count)


def _ends(length: int, count: int) -> tuple[int, ...]:
    """Where each segment ends."""
    return tuple(np.cumsum(segments(length, count)).tolist())


def _sums(costs: Costs) -> tuple[Counts, Counts, Counts]:
    return costs.messages, costs.bytes, costs.rounds
