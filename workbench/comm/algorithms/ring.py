"""Ring all-reduce: 2 (k-1) rounds, in which a rank hears only from the one before it.

The k near-equal segments travel round the ring: first every rank adds its own part to a segment
and passes it on, until rank i holds the sum of segment i; then the sums travel round once more. A
rank receives 2 (k-1)/k of the bytes, with room for one segment beside them.

A half type is rounded at every hop, up to k-1 times, where one owner's sum is rounded once.

Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.algorithms.exchange import Exchange, Rounds
from workbench.comm.pieces import cut, even


def ring(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    """Sums `flat` in place over `members`, of which this rank is number `me`."""
    k = len(members)
    segments = cut(flat, even(len(flat), k))
    before, after = members[me - 1], members[(me + 1) % k]
    room = flat.new_empty(len(segments[0]))  # the first is the longest
    for step in range(1, k):
        passed_on, own = segments[(me - step) % k], segments[(me - step - 1) % k]
        arrived = room[: len(own)]
        yield Exchange(((after, passed_on),), ((before, arrived),), len(own))
        own += arrived
    for step in range(k - 1):
        passed_on, whole = segments[(me - step) % k], segments[(me - step - 1) % k]
        yield Exchange(((after, passed_on),), ((before, whole),))
