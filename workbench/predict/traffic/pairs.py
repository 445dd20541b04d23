"""Who sends how much to whom in a step: the traffic, of every pair of ranks; exact."""

from dataclasses import dataclass

import numpy as np

from workbench.plan.errors import ExperimentError
from workbench.predict.traffic.counting import Counting, Key
from workbench.predict.traffic.givers import Table
from workbench.predict.traffic.received import Received
from workbench.program.collective_call import Phase, Purpose
from workbench.program.rows import Counts
from workbench.program.step import Program

MOST_RANKS = 512


@dataclass(frozen=True, eq=False)
class Pairs:
    """All calls of one collective in a step.

    Attributes:
        op: as the recorder names it.
        layer: for which it is.
        phase: of the step.
        purpose: of its groups.
        every: steps from one to the next; 1: it is in every step.
        bytes: that a rank receives of another one, [taker, giver].
    """

    op: str
    layer: str
    phase: Phase
    purpose: Purpose
    every: int
    bytes: Table


def pairs_of(program: Program) -> tuple[Pairs, ...]:
    """The collectives of one step, in its order; rows add up to those of `traffic_of`.

    Raises:
        ExperimentError: more than 512 ranks, of which there are too many pairs.
    """
    world = program.plan.world_size
    if world > MOST_RANKS:
        raise ExperimentError(
            f"pairs of ranks are counted for up to {MOST_RANKS} ranks, got {world:,}; "
            "prediction.at(world_size=...) has the same plan on fewer"
        )
    return _Pairing(program).pairs()


class _Pairing(Counting):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._tables: dict[Key, Table] = {}

    def pairs(self) -> tuple[Pairs, ...]:
        self.found()
        return tuple(
            Pairs(op, layer, phase, purpose, every, table)
            for (op, layer, phase, purpose, _, every), table in self._tables.items()
        )

    def count(self, key: Key, got: Received, calls: Counts) -> None:
        if key not in self._tables:
            self._tables[key] = np.zeros((self.world, self.world), dtype=np.int64)
        for give in got.givers:
            give(self._tables[key], calls)
