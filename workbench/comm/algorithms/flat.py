"""The all-reduce algorithms that know no hosts: direct, ring, halving-doubling.

In all of them a rank of k receives 2 (k-1)/k of the bytes, as little as any algorithm can. They
differ in rounds, in from how many ranks at once a rank receives, and in how often a half type is
rounded:

                      rounds          from at once    roundings of a half type
    direct            2               k-1             1
    ring              2 (k-1)         1               up to k-1
    halving_doubling  2 log2(k)       1               log2(k)

Direct and ring also take a codec, and then code equally much. A rank of k encodes each of the k
segments once and decodes as many values as it receives, 2 (k-1)/k of them all. They differ in how
often a value is rounded. A residual, which keeps what this rank's encodings leave out, has a place
for every element in both.

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619; that data stay compressed on every hop of a ring
is recalled from it) for coded rounds. The rest is ours.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from torch import Tensor

from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.messages.flat import (
    MessageRound,
    MessageRounds,
    accumulator,
    added,
    blocks,
    cut,
    even,
)
from workbench.plan.extension.extension import extension_of
from workbench.plan.extension.user_object import Own


class Direct(Algorithm):
    """All-reduces with two synchronisations, whatever the number of ranks.

    Each rank owns a segment. In the first round every rank sends every other its segment; the
    owner adds up what came, in rank order, half types in fp32. In the second round it sends the
    sum to all. A rank receives from k-1 ranks at once, which is why each begins with the next
    one. That is for near-equal segments; others are as right, for who adds up an element changes
    nothing about its sum. Between its rounds an owner may make something else of the sum, and
    send that (`comm/owned.py`).

    Source: Chen et al. 2018, arXiv:1802.02326 (GDRAA; their body was not available to us, the two
    synchronisations are from the abstract); a reduce-scatter and an all-gather by pairwise
    exchange, Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521.
    """

    name = "direct"

    def rounds(self, flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
        sizes = even(len(flat), len(members))
        yield from to_owners(flat, sizes, members, me)
        yield from from_owners(flat, sizes, members, me)

    def coded_rounds(
        self, flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding
    ) -> MessageRounds:
        """Rounds a value twice, whatever the number of ranks, in two rounds of messages.

        Every rank encodes its part of each segment for the segment's owner, who adds them up in
        rank order, with its own part as it is, and encodes the sum for all, itself included.
        """
        k = len(members)
        if k == 1:
            return
        sizes = even(len(flat), k)
        segments, codings = cut(flat, sizes), coding.cut(sizes)
        mine, others = segments[me], [i for i in range(k) if i != me]
        wires = coding.buffers(sizes)
        arrived = coding.buffers([0 if i == me else sizes[me] for i in range(k)])
        for i in others:
            codings[i].encode(segments[i], wires[i])
        yield MessageRound(
            tuple((members[i], wires[i]) for i in others),
            tuple((members[i], arrived[i]) for i in others),
            len(others) * sizes[me],
        )
        total = mine.new_zeros(len(mine), dtype=accumulator(mine.dtype))
        for i in range(k):
            if i == me:
                total += mine
            else:
                coding.add(arrived[i], total)
        codings[me].encode(total, wires[me])
        coding.decode(wires[me], mine)
        yield MessageRound(
            tuple((members[i], wires[me]) for i in others),
            tuple((members[i], wires[i]) for i in others),
        )
        for i in others:
            coding.decode(wires[i], segments[i])


def to_owners(flat: Tensor, sizes: Sequence[int], members: Sequence[int], me: int) -> MessageRounds:
    """Sums this rank's segment of `flat` in place, and no other: the first round of `direct`.

    Args:
        flat: the summand [sum(sizes)] of this rank.
        sizes: the elements of each rank's segment, zero included; they lie one after another.
    """
    segments, others = cut(flat, sizes), _next_first(len(members), me)
    if not others:
        return
    mine = segments[me]
    arrived = dict(zip(others, flat.new_empty(len(others), len(mine)), strict=True))
    yield MessageRound(
        tuple((members[i], segments[i]) for i in others),
        tuple((members[i], arrived[i]) for i in others),
        len(others) * len(mine),
    )
    parts = [mine if i == me else arrived[i] for i in range(len(members))]
    for block in blocks(mine):
        mine[block] = added([part[block] for part in parts])


def from_owners(
    flat: Tensor, sizes: Sequence[int], members: Sequence[int], me: int
) -> MessageRounds:
    """Sends this rank's segment to all, and receives the others: the second round of `direct`."""
    segments, others = cut(flat, sizes), _next_first(len(members), me)
    if others:
        yield MessageRound(
            tuple((members[i], segments[me]) for i in others),
            tuple((members[i], segments[i]) for i in others),
        )


def _next_first(count: int, me: int) -> list[int]:
    """Returns the indices of the others, from the next one round to the one before."""
    return [(me + distance) % count for distance in range(1, count)]


class Ring(Algorithm):
    """All-reduces in 2 (k-1) rounds, in which a rank receives only from the one before it.

    The k near-equal segments travel round the ring: first every rank adds its own part to a
    segment and passes it on, until rank i holds the sum of segment i; then the sums travel round
    once more. One segment of memory is needed beside `flat`.

    Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """

    name = "ring"

    def rounds(self, flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
        k = len(members)
        segments = cut(flat, even(len(flat), k))
        before, after = members[me - 1], members[(me + 1) % k]
        room = flat.new_empty(len(segments[0]))  # the first is the longest
        for step in range(1, k):
            passed_on, own = segments[(me - step) % k], segments[(me - step - 1) % k]
            arrived = room[: len(own)]
            yield MessageRound(((after, passed_on),), ((before, arrived),), len(own))
            own += arrived
        for step in range(k - 1):
            passed_on, whole = segments[(me - step) % k], segments[(me - step - 1) % k]
            yield MessageRound(((after, passed_on),), ((before, whole),))

    def coded_rounds(
        self, flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding
    ) -> MessageRounds:
        """Decodes a sum, adds to it and encodes it again at every hop: it is rounded k times.

        When it is complete, its bytes go round as they are. Its owner decodes them too, so that
        all have the same bits.
        """
        k = len(members)
        if k == 1:
            return
        sizes = even(len(flat), k)
        segments, codings = cut(flat, sizes), coding.cut(sizes)
        before, after = members[me - 1], members[(me + 1) % k]
        sent, arrived = coding.buffers([sizes[0]] * 2)  # the first is the longest

        def of(index: int, buffer: Tensor) -> Tensor:
            """Returns as much of a buffer as a segment takes."""
            return buffer[: coding.size(sizes[index])]

        for step in range(1, k):
            mine, theirs = (me - step) % k, (me - step - 1) % k
            codings[mine].encode(segments[mine], of(mine, sent))
            wires = ((after, of(mine, sent)),), ((before, of(theirs, arrived)),)
            yield MessageRound(*wires, sizes[theirs])
            coding.add(of(theirs, arrived), segments[theirs])
        codings[me].encode(segments[me], of(me, sent))
        coding.decode(of(me, sent), segments[me])
        for step in range(k - 1):
            mine, theirs = (me - step) % k, (me - step - 1) % k
            yield MessageRound(((after, of(mine, sent)),), ((before, of(theirs, arrived)),))
            coding.decode(of(theirs, arrived), segments[theirs])
            sent, arrived = arrived, sent


class HalvingDoubling(Algorithm):
    """All-reduces in 2 log2(k) rounds, for k a power of two.

    Ranks at distance k/2 swap halves and add them up, then those at distance k/4 quarters of these
    halves, and so on, until every rank holds the sum of one segment; the way back gathers.

    Other group sizes are folded: of the p + surplus ranks, p the largest power of two, each
    surplus rank first sends all it has to a rank of the p, and receives the sum at the end. That
    is two rounds more, and for these pairs the whole tensor once more in each of them; a half type
    is rounded once more.

    Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp 2005,
    doi:10.1177/1094342005051521, on all-reduce.
    """

    name = "halving_doubling"

    def rounds(self, flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
        power = 1 << (len(members).bit_length() - 1)
        surplus = len(members) - power
        if me >= power:
            partner = members[me - power]
            yield MessageRound(sends=((partner, flat),))
            yield MessageRound(receives=((partner, flat),))
            return
        if me < surplus:
            arrived = flat.new_empty(len(flat))
            yield MessageRound(receives=((members[power + me], arrived),), additions=len(flat))
            flat += arrived
        yield from _among_a_power_of_two(flat, members[:power], me)
        if me < surplus:
            yield MessageRound(sends=((members[power + me], flat),))


def _among_a_power_of_two(flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
    starts = [0, *accumulate(even(len(flat), len(members)))]
    distances = [1 << level for level in range(len(members).bit_length() - 1)]

    def block(member: int, size: int) -> Tensor:
        """Returns the block of `size` consecutive segments that holds the member's own."""
        first = member // size * size
        return flat[starts[first] : starts[first + size]]

    room = flat.new_empty(starts[len(members) // 2])
    for distance in reversed(distances):
        other = me ^ distance
        mine, theirs = block(me, distance), block(other, distance)
        arrived = room[: len(mine)]
        yield MessageRound(((members[other], theirs),), ((members[other], arrived),), len(mine))
        mine += arrived
    for distance in distances:
        other = me ^ distance
        mine, theirs = block(me, distance), block(other, distance)
        yield MessageRound(((members[other], mine),), ((members[other], theirs),))


FLAT: Mapping[str, Algorithm] = MappingProxyType(
    {one.name: one for one in (Direct(), Ring(), HalvingDoubling())}
)
"""The algorithms of this file, by name."""


def algorithm_of(which: str | Own) -> Algorithm:
    """Returns a built-in algorithm that knows no hosts, or one of a person's own.

    Raises:
        OwnObjectError: it cannot be loaded, or is no algorithm.
    """
    if isinstance(which, str):
        return FLAT[which]
    found: Algorithm = extension_of(which, "algorithms")
    return found
