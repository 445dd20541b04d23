"""Direct all-reduce: two synchronisations, whatever the number of ranks.

Each rank owns a segment. In the first round every rank sends every other its segment; the owner
adds up what came, in rank order, half types in fp32. In the second round it sends the sum to all.
A rank of k receives 2 (k-1)/k of the bytes, as little as any algorithm can, and adds (k-1)/k of
the elements, in 2 rounds instead of the ring's 2 (k-1); but from k-1 ranks at once, which is why
each rank begins with the next one. That is for near-equal segments; others are as right, for who
adds up an element changes nothing about its sum.

Between its rounds an owner may make something else of the sum, and send that (`owned.py`).

Source: Chen et al. 2018, arXiv:1802.02326 (GDRAA; their body was not available to us, the two
synchronisations are from the abstract); a reduce-scatter and an all-gather by pairwise exchange,
Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521.
"""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.algorithms.exchange import Exchange, Rounds
from workbench.comm.algorithms.sums import added, blocks
from workbench.comm.pieces import cut, even


def direct(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    """Sums `flat` in place over `members`, of which this rank is number `me`."""
    sizes = even(len(flat), len(members))
    yield from to_owners(flat, sizes, members, me)
    yield from from_owners(flat, sizes, members, me)


def to_owners(flat: Tensor, sizes: Sequence[int], members: Sequence[int], me: int) -> Rounds:
    """Its first round: sums, in place, this rank's segment of `flat`, and leaves the others.

    Args:
        flat: of every rank.
        sizes: elements of each rank's segment, zero included; they lie one after another.
        members: the ranks.
        me: which of them this is.
    """
    segments, others = cut(flat, sizes), _next_first(len(members), me)
    if not others:
        return
    mine = segments[me]
    arrived = dict(zip(others, flat.new_empty(len(others), len(mine)), strict=True))
    yield Exchange(
        tuple((members[i], segments[i]) for i in others),
        tuple((members[i], arrived[i]) for i in others),
        len(others) * len(mine),
    )
    parts = [mine if i == me else arrived[i] for i in range(len(members))]
    for block in blocks(mine):
        mine[block] = added([part[block] for part in parts])


def from_owners(flat: Tensor, sizes: Sequence[int], members: Sequence[int], me: int) -> Rounds:
    """Its second round: hands out this rank's segment, and takes those of the others."""
    segments, others = cut(flat, sizes), _next_first(len(members), me)
    if others:
        yield Exchange(
            tuple((members[i], segments[me]) for i in others),
            tuple((members[i], segments[i]) for i in others),
        )


def _next_first(count: int, me: int) -> list[int]:
    """The others, from the next one round to the one before."""
    return [(me + distance) % count for distance in range(1, count)]
