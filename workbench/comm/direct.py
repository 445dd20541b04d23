"""Direct all-reduce: two synchronisations, whatever the number of ranks.

Each rank owns a near-equal segment. In the first round every rank sends every other its segment;
the owner adds up what came, in rank order, half types in fp32. In the second round it sends the
sum to all. A rank of k receives 2 (k-1)/k of the bytes, as little as any algorithm can, in 2
rounds instead of the ring's 2 (k-1); but from k-1 ranks at once.

Source: Chen et al. 2018, arXiv:1802.02326 (GDRAA; their body was not available to us, the two
synchronisations are from the abstract); a reduce-scatter and an all-gather by pairwise exchange,
Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521.
"""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.exchange import Exchange, Rounds
from workbench.comm.pieces import cut, even
from workbench.comm.sums import added, blocks


def direct(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    """Sums `flat` in place over `members`, of which this rank is number `me`."""
    segments = cut(flat, even(len(flat), len(members)))
    mine, others = segments[me], [i for i in range(len(members)) if i != me]
    if not others:
        return
    arrived = cut(flat.new_empty(len(others) * len(mine)), [len(mine)] * len(others))
    yield Exchange(
        tuple((members[i], segments[i]) for i in others),
        tuple((members[i], part) for i, part in zip(others, arrived, strict=True)),
    )
    parts = [*arrived[:me], mine, *arrived[me:]]
    for block in blocks(mine):
        mine[block] = added([part[block] for part in parts])
    yield Exchange(
        tuple((members[i], mine) for i in others),
        tuple((members[i], segments[i]) for i in others),
    )
