"""Counts the collectives of a step, instruction by instruction."""

import numpy as np

from workbench.predict.traffic.call_received import received_of
from workbench.predict.traffic.received import Received
from workbench.predict.traffic.summing import Summing
from workbench.predict.traffic.traffic import Collective, Traffic
from workbench.program.collective_call import CollectiveCall, Phase, Purpose
from workbench.program.rows import Counts
from workbench.program.step import Program


def traffic_of(program: Program) -> Traffic:
    """The collectives of one step of an experiment."""
    return Counting(program).found()


Key = tuple[str, str, Phase, Purpose, tuple[tuple[int, ...], ...], int]


class Counting:
    """Goes through a step, and adds up what every collective brings.

    Args:
        program: of the step.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.world = program, program.plan.world_size
        self.everywhere = np.ones(self.world, dtype=np.int64)
        self.summing = Summing(program.hosts)
        self._sums: dict[Key, tuple[Counts, Counts, Counts]] = {}

    def found(self) -> Traffic:
        """The collectives, in the order in which they first occur."""
        collectives = self.program.collectives
        for instruction in self.program.instructions:
            for call in collectives.of(instruction):
                self._add(call)
        found = []
        for (op, layer, phase, purpose, groups, every), sums in self._sums.items():
            calls, messages, sizes = map(_listed, sums)
            found.append(
                Collective(op, layer, phase, purpose, groups, calls, messages, sizes, every)
            )
        return Traffic(tuple(found))

    def _add(self, call: CollectiveCall) -> None:
        got, calls = received_of(call, self.summing), call.takes
        if calls is None:
            calls = self.everywhere
        groups = tuple(map(tuple, call.groups(self.world)))
        key = (call.op, call.label, call.phase, call.purpose, groups, call.every)
        sums = self._sums.setdefault(key, self._nothing())
        for total, more in zip(sums, (calls, got.messages * calls, got.bytes * calls), strict=True):
            total += more
        self.count(key, got, calls)

    def count(self, key: Key, got: Received, calls: Counts) -> None:
        """Takes note of a collective, called so often by each rank: for those who want to know."""

    def _nothing(self) -> tuple[Counts, Counts, Counts]:
        none = np.zeros_like(self.everywhere)
        return none, none.copy(), none.copy()


def _listed(counts: Counts) -> tuple[int, ...]:
    return tuple(counts.tolist())
