"""What of a segment is there in the backward pass of each of its layers."""

import numpy as np

from workbench.predict.search.limit.recompute import Keeping
from workbench.predict.search.space.trellis import Floats, Integers


def seen_of(there: Floats, left: Integers, keeping: Keeping) -> Floats:
    """[stages]: bytes of the layers up to each, as far as prices reckon with them.

    Args:
        there: bytes of each layer.
        left: so many further layers of its segment are looked at.
        keeping: the automaton.
    """
    found = np.zeros(len(there) + 1)
    ends = [reach[more] for reach, more in zip(keeping.reaches, left, strict=True)]
    np.add.at(found, np.arange(len(there)), there)
    np.subtract.at(found, ends, there)
    return found[:-1].cumsum()


def summed_of(there: Floats, again: Floats, tails: Floats, keeping: Keeping) -> Floats:
    """[stages]: bytes of the layers up to each.

    Args:
        there: bytes of each layer.
        again: whether it is computed again.
        tails: whether it is in the tail, which is a segment of its own.
        keeping: the automaton.
    """
    found, total = np.zeros(len(there)), 0.0
    for index, takes_part in enumerate(keeping.parts):
        begins = index > 0 and tails[index] != tails[index - 1]
        if takes_part and (not again[index] or begins):
            total = 0.0
        total += there[index]
        found[index] = total if takes_part else there[index]
    return found
