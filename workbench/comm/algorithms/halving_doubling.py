"""Halving-doubling all-reduce: 2 log2(k) rounds, for k a power of two.

Ranks at distance k/2 swap halves and add them up, then those at distance k/4 quarters of these
halves, and so on, until every rank holds the sum of one segment; the way back gathers. A rank
receives 2 (k-1)/k of the bytes, like in the ring, in fewer rounds.

Other group sizes are folded: of the p + surplus ranks, p the largest power of two, each surplus
rank first gives all it has to a rank of the p, and gets the sum at the end. That is two rounds
more, and for these pairs the whole tensor once more in each of them.

A half type is rounded at every addition: log2(p) times, and once more where a rank is folded in.

Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521, on all-reduce.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from workbench.comm.algorithms.exchange import Exchange, Rounds
from workbench.comm.pieces import even


def halving_doubling(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    """Sums `flat` in place over `members`, of which this rank is number `me`."""
    power = 1 << (len(members).bit_length() - 1)
    surplus = len(members) - power
    if me >= power:
        partner = members[me - power]
        yield Exchange(sends=((partner, flat),))
        yield Exchange(receives=((partner, flat),))
        return
    if me < surplus:
        arrived = flat.new_empty(len(flat))
        yield Exchange(receives=((members[power + me], arrived),), additions=len(flat))
        flat += arrived
    yield from _among_a_power_of_two(flat, members[:power], me)
    if me < surplus:
        yield Exchange(sends=((members[power + me], flat),))


def _among_a_power_of_two(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    starts = [0, *accumulate(even(len(flat), len(members)))]
    distances = [1 << level for level in range(len(members).bit_length() - 1)]

    def block(member: int, size: int) -> Tensor:
        """Of the blocks of `size` consecutive segments the one that holds the member's own."""
        first = member // size * size
        return flat[starts[first] : starts[first + size]]

    room = flat.new_empty(starts[len(members) // 2])
    for distance in reversed(distances):
        other = me ^ distance
        mine, theirs = block(me, distance), block(other, distance)
        arrived = room[: len(mine)]
        yield Exchange(((members[other], theirs),), ((members[other], arrived),), len(mine))
        mine += arrived
    for distance in distances:
        other = me ^ distance
        mine, theirs = block(me, distance), block(other, distance)
        yield Exchange(((members[other], mine),), ((members[other], theirs),))
