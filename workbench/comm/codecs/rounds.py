"""The all-reduce algorithms of coded values: what they send, and who codes what.

Ring and direct code equally much. A rank of k encodes each of the k segments once and decodes as
many values as it receives, 2 (k-1)/k of them all. They differ in how often a value is rounded. A
residual, which keeps what this rank's encodings leave out, has a place for every element in both.

`flat` [elements] is summed in place over `members`, of which this rank is number `me`.

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619; that data stay compressed on every hop of a ring
is recalled from it). The rest is ours.
"""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.algorithms.exchange import MessageRound, MessageRounds
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.pieces import accumulator, cut, even


def ring(flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding) -> MessageRounds:
    """Decodes a sum, adds to it and encodes it again at every hop, so that it is rounded k times.

    When it is complete, its bytes go round as they are. Its owner decodes them too, so that all
    have the same bits.
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


def direct(flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding) -> MessageRounds:
    """Rounds a value twice, whatever the number of ranks, in two rounds of messages.

    Every rank encodes its part of each segment for the segment's owner, who adds them up in rank
    order, with its own part as it is, and encodes the sum for all, itself included.
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


def swap(flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding) -> MessageRounds:
    """Sums between two in one round: both add up what both have encoded, rounded once."""
    mine, theirs = coding.buffers([len(flat)] * 2)
    coding.encode(flat, mine)
    yield MessageRound(((members[1 - me], mine),), ((members[1 - me], theirs),), len(flat))
    coding.decode(mine, flat)
    coding.add(theirs, flat)  # a + b and b + a have the same bits
