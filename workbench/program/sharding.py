"""The optimizer's work cut over ranks that hold the same parameters: who moves what.

Source: `plan/division.py` divides; `train/sharded.py` executes it.
"""

from collections.abc import Sequence

import numpy as np

from workbench.plan.division import divide
from workbench.program.buckets import Buckets, Column
from workbench.program.parameters import Pieces
from workbench.program.rows import Counts


def moved_by(column: Column, element: int, shares: Sequence[float]) -> dict[str, Counts]:
    """Bytes that each rank moves of each parameter in its bucket.

    Args:
        column: a bucket of each rank.
        element: bytes of one.
        shares: of each rank.
    """
    world_size, k = len(column.place), column.group_size
    index = np.arange(world_size) // k
    found: dict[str, Counts] = {}
    known: dict[tuple[int, tuple[float, ...]], list[int]] = {}  # ranks of groups that divide alike
    for member in range(k):
        known.setdefault((int(column.place[member]), tuple(shares[member::k])), []).append(member)
    for (place, of), members in known.items():
        bucket = column.of_place[place]
        if bucket is None:
            continue
        ranks = np.flatnonzero(np.isin(np.arange(world_size) % k, members))
        parts = divide([size // element for size in bucket.sizes], of)
        for name, part in zip(bucket.names, parts, strict=True):
            moved = found.setdefault(name, np.zeros(world_size, dtype=np.int64))
            moved[ranks] = np.array(part, dtype=np.int64)[index[ranks]] * element
    return found


def updated(
    pieces: Pieces, buckets: Buckets | None, element: int, shares: Sequence[float]
) -> dict[str, Counts]:
    """Bytes of each parameter that each rank moves.

    Args:
        pieces: of the weights.
        buckets: that parameters with replicas are cut in; None: each rank moves all it holds.
        element: bytes of one.
        shares: of each rank.
    """
    found = {name: pieces.sizes[name] for name in pieces.names}
    cut: dict[str, Counts] = {}
    for column in buckets.columns() if buckets is not None else ():
        for name, moved in moved_by(column, element, shares).items():
            cut[name] = cut[name] + moved if name in cut else moved
    return {**found, **cut}
