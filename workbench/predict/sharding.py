"""The optimizer's work cut over ranks that hold the same parameters: who moves what.

Source: `plan/division.py` divides; `train/sharded.py` executes it.
"""

import numpy as np

from workbench.plan.division import divide
from workbench.predict.buckets import Buckets, Column
from workbench.predict.parameters import Pieces
from workbench.predict.rows import Counts


def moved_by(column: Column, element: int) -> dict[str, Counts]:
    """Bytes that each rank moves of each parameter in its bucket.

    Args:
        column: a bucket of each rank.
        element: bytes of one.
    """
    world_size = len(column.place)
    replicas = world_size // column.group_size
    index = np.arange(world_size) // column.group_size
    found: dict[str, Counts] = {}
    for place, bucket in enumerate(column.of_place):
        if bucket is None:
            continue
        ranks = np.flatnonzero(column.place == place)
        parts = divide([size // element for size in bucket.sizes], replicas)
        for name, part in zip(bucket.names, parts, strict=True):
            moved = found.setdefault(name, np.zeros(world_size, dtype=np.int64))
            moved[ranks] = np.array(part, dtype=np.int64)[index[ranks]] * element
    return found


def updated(pieces: Pieces, buckets: Buckets | None, element: int) -> dict[str, Counts]:
    """Bytes of each parameter that each rank moves.

    Args:
        pieces: of the weights.
        buckets: that parameters with replicas are cut in; None: each rank moves all it holds.
        element: bytes of one.
    """
    found = {name: pieces.sizes[name] for name in pieces.names}
    cut: dict[str, Counts] = {}
    for column in buckets.columns() if buckets is not None else ():
        for name, moved in moved_by(column, element).items():
            cut[name] = cut[name] + moved if name in cut else moved
    return {**found, **cut}
