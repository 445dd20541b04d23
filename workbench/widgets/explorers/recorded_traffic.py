"""Who sent how much to whom in a run: what its ranks counted while they stepped."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Recorded:
    """What all ranks of a run's last attempt counted.

    Attributes:
        world: how many ranks they are.
        steps: in which they counted.
        tables: bytes of a step that a rank received of another one, [taker, giver], by collective
            and phase.
    """

    world: int
    steps: int
    tables: Mapping[tuple[str, str], Array]

    def table(self, op: str | None, phase: str | None) -> Array:
        """The sum over collectives and phases, or those of one; None: all."""
        whole = np.zeros((self.world, self.world))
        for (own_op, own_phase), table in self.tables.items():
            if op in (None, own_op) and phase in (None, own_phase):
                whole += table
        return whole


def recorded(run: Any) -> Recorded | None:
    """What a run recorded; None while it goes on, or where it made no step.

    Args:
        run: a `Run`, of which the outcomes are read.
    """
    outcomes = run.outcomes
    if not outcomes or not outcomes[0].steps_counted:
        return None
    world, steps = len(outcomes), outcomes[0].steps_counted
    tables: dict[tuple[str, str], Array] = {}
    for taker, outcome in enumerate(outcomes):
        for op, phase, giver, size in outcome.given:
            table = tables.setdefault((op, phase), np.zeros((world, world)))
            table[taker, giver] += size / steps
    return Recorded(world, steps, tables)
