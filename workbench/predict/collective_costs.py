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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType


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
class TwoLevelCost:
    """What one rank has to do with a hierarchical all-reduce.

    Attributes:
        within: through its host's memory.
        across: over the wire.
    """

    within: Cost
    across: Cost


def direct(length: int, itemsize: int, ranks: int) -> tuple[Cost, ...]:
    """Everybody sends everybody a segment, twice."""
    return tuple(_direct(length, itemsize, ranks, rank) for rank in range(ranks))


def ring(length: int, itemsize: int, ranks: int) -> tuple[Cost, ...]:
    """In each of the two turns a rank receives all segments but one.

    In the first that is the one that it passes on first, of the rank before it; in the second
    the one that it has added up, its own.
    """
    if ranks == 1:
        return (Cost(),)
    costs = []
    for rank in range(ranks):
        spared = [_segment(length, ranks, rank), _segment(length, ranks, (rank - 1) % ranks)]
        filled = 2 * min(length, ranks) - sum(size > 0 for size in spared)
        costs.append(Cost(filled, (2 * length - sum(spared)) * itemsize, 2 * (ranks - 1)))
    return tuple(costs)


def halving_doubling(length: int, itemsize: int, ranks: int) -> tuple[Cost, ...]:
    """At each of log2(p) distances a rank receives what it keeps, and later what it gave away.

    Of the blocks of `distance` segments that is its own one, then its neighbour's. Each of the
    ranks beyond p, the largest power of two, brings its tensor to one of the p, and fetches the
    sum.
    """
    power = 2 ** (ranks.bit_length() - 1)
    levels = power.bit_length() - 1
    whole = Cost(int(length > 0), length * itemsize, 1)
    costs = []
    for rank in range(power):
        cost = Cost()
        for distance in (2**level for level in range(levels)):
            for number in (rank // distance, rank // distance ^ 1):
                begin, end = (_start(length, power, n * distance) for n in (number, number + 1))
                cost += Cost(int(end > begin), (end - begin) * itemsize, 1)
        costs.append(cost + whole + Cost(rounds=1) if rank < ranks - power else cost)
    return tuple(costs) + (whole + Cost(rounds=1),) * (ranks - power)


def hierarchical(length: int, itemsize: int, hosts: Sequence[int]) -> tuple[TwoLevelCost, ...]:
    """Direct within each host; then, of each stripe, among those who own it on their hosts.

    Args:
        length: in elements.
        itemsize: in bytes.
        hosts: how many ranks each has.

    Returns:
        Of all ranks of the first host, then of the second, and so on.
    """
    ends = {_start(length, ranks, i) for ranks in hosts for i in range(ranks + 1)}
    stripes = list(pairwise(sorted(ends)))
    costs = []
    for here, ranks in enumerate(hosts):
        for rank in range(ranks):
            begin, end = _start(length, ranks, rank), _start(length, ranks, rank + 1)
            own = [b - a for a, b in stripes if begin <= a < end]
            moved = [_across(size, itemsize, len(hosts), here) for size in own]
            across = Cost(
                sum(cost.messages for cost in moved),
                sum(cost.bytes for cost in moved),
                max((cost.rounds for cost in moved), default=0),  # stripes go side by side
            )
            within = _direct(length, itemsize, ranks, rank)
            costs.append(TwoLevelCost(within, across))
    return tuple(costs)


FLAT: Mapping[str, Callable[[int, int, int], tuple[Cost, ...]]] = MappingProxyType(
    {"direct": direct, "ring": ring, "halving_doubling": halving_doubling}
)
"""The algorithms that know no hosts: of (length, itemsize, ranks), the cost of each rank."""


def _direct(length: int, itemsize: int, ranks: int, rank: int) -> Cost:
    if ranks == 1:
        return Cost()
    own = _segment(length, ranks, rank)
    others = length - own
    messages = (ranks - 1) * (own > 0) + min(length, ranks) - (own > 0)
    return Cost(messages, ((ranks - 1) * own + others) * itemsize, 2)


def _across(length: int, itemsize: int, hosts: int, here: int) -> Cost:
    if hosts == 2:
        return Cost(int(length > 0), length * itemsize, 1)
    return _direct(length, itemsize, hosts, here)


def _segment(length: int, count: int, index: int) -> int:
    """Elements of one of `count` near-equal segments."""
    return length // count + (index < length % count)


def _start(length: int, count: int, index: int) -> int:
    """Where that segment begins."""
    return index * (length // count) + min(index, length % count)
