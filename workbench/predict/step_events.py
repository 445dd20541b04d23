"""The events of one step: loading, forward and backward passes, sums, agreement, update.

The order is that of `train/loop.py` and `train/step.py`. Backward passes go through the operations
in reverse; a segment that is recomputed runs forward once more before its first one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.plan.experiment import LocalSGD, Synchronous
from workbench.plan.graph import Layer
from workbench.plan.tail import Tail, round_rows
from workbench.predict.duration import Speeds, load_seconds
from workbench.predict.events import Event, Script
from workbench.predict.layer_times import LayerTimes
from workbench.predict.pass_events import PassEvents
from workbench.predict.replicas import Replicas
from workbench.predict.sums import Sums
from workbench.predict.update_events import Updates
from workbench.program.operations import Value
from workbench.program.parameters import tail_names
from workbench.program.representatives import Representatives
from workbench.program.rows import Rows
from workbench.program.step import Program


@dataclass(frozen=True)
class Written:
    """The events of a step, and how well their times are known.

    Attributes:
        events: of a step.
        error: relative half width of the band around the layers' seconds.
        estimated: layers of shapes that the machine has not measured.
        algorithms: of the all-reduces, by what they sum.
    """

    events: tuple[Event, ...]
    error: float
    estimated: tuple[str, ...]
    algorithms: Mapping[str, tuple[str, ...]]


def written(
    program: Program, ranks: Representatives, speeds: Speeds, *, averaging: bool = False
) -> Written:
    """The events of a step on the ranks that stand for a world.

    Args:
        program: of a world of just these ranks.
        ranks: they.
        speeds: of them.
        averaging: whether local SGD averages in this step.
    """
    return _Step(program, ranks, speeds).written(averaging)


class _Step:
    def __init__(self, program: Program, ranks: Representatives, speeds: Speeds) -> None:
        self.program, self.ranks, self.speeds = program, ranks, speeds
        self.plan, self.sync = program.plan, program.experiment.sync
        self.script = Script()
        self.times = LayerTimes(self.plan, program.experiment.precision, speeds)
        self.replicas = Replicas(ranks, speeds)
        self.updates = Updates(program, self.replicas, self.script)
        self.tail = self.plan.tail if self.plan.rounds != "BK" else None
        self.behind: set[str] = set()
        if isinstance(self.sync, Synchronous) and self.sync.per_round:
            self.behind = tail_names(self.plan)
        self.head = self._sums(set(program.pieces.names) - self.behind)
        self.per_round = self._sums(self.behind) if self.behind else None
        self._passes: dict[tuple[int, ...], PassEvents] = {}

    def written(self, averaging: bool) -> Written:
        self._load()
        batches = self.ranks.batches
        for index, rows in enumerate(batches):
            last = index == len(batches) - 1
            if self.tail is None:
                passing = self._passing(rows)
                passing.forward(list(self.program.operations))
                passing.loss()
                settles = self._settles(last)
                passing.backward(list(self.program.operations), settles, adds=index > 0)
            else:
                self._in_rounds(rows, self.tail, last, adds=index > 0)
        if self.head is not None:
            self.head.finish()
        self.updates.agree()
        self.updates.update(set(self.program.pieces.names) - self.behind)
        if averaging and isinstance(self.sync, LocalSGD):
            self.updates.average(self.sync)
        self.updates.rest()
        algorithms = {label: tuple(names) for label, names in self.replicas.algorithms.items()}
        estimated = tuple(self.times.estimated)
        return Written(self.script.events(), self.times.error, estimated, algorithms)

    def _load(self) -> None:
        sample = int(np.prod(self.plan.graph.input_shape)) * self.program.itemsize
        rows = np.array(self.ranks.batches).sum(axis=0)
        self.script.work("load", "input", load_seconds(rows * sample, self.speeds))

    def _in_rounds(self, rows: tuple[int, ...], tail: Tail, last: bool, *, adds: bool) -> None:
        """The head once, the tail in rounds; the next round's rows are gathered beside one."""
        boundary: Value = (tail.boundary, ())
        head, behind = self.program.operations.parted(tail)
        gathers = [operation for operation in behind if operation.reads == (boundary,)]
        whole = self._passing(rows)
        whole.forward(head)
        every = [
            self._passing(brought)
            for brought in round_rows(self.plan.rounds, rows, tail.group_size)
        ]
        ahead = [every[0].start_gathers(gathers)]
        for index, passing in enumerate(every):
            if index + 1 < len(every):
                ahead.append(every[index + 1].start_gathers(gathers))
            passing.forward(behind, ahead[index])
            passing.loss()
            settles = self._settles(last and index == len(every) - 1)
            further = (adds or index > 0) and self.per_round is None
            passing.backward(behind, settles, adds=further)
            if self.per_round is not None:
                self.per_round.finish()
                self.updates.update(self.behind)
                self.per_round.begin()
        if self.program.operations.needs_gradient(boundary):
            whole.backward(head, self._settles(last), adds=adds)

    def _settles(self, last: bool) -> "_Settles":
        return _Settles(self.head if last else None, self.per_round)

    def _passing(self, rows: tuple[int, ...]) -> PassEvents:
        if rows not in self._passes:
            self._passes[rows] = PassEvents(
                self.program, self.replicas, self.script, Rows(rows), self.times
            )
        return self._passes[rows]

    def _sums(self, names: set[str]) -> Sums | None:
        if isinstance(self.sync, LocalSGD):
            return None
        program = self.program
        buckets, itemsize, experiment = program.buckets, program.itemsize, program.experiment
        return Sums(buckets, names, self.replicas, self.script, itemsize, experiment)


class _Settles:
    """Tells the sums of a layer's gradients: the step's when it is time, the round's always."""

    def __init__(self, head: Sums | None, per_round: Sums | None) -> None:
        self._sums = [sums for sums in (head, per_round) if sums is not None]

    def __call__(self, layer: Layer) -> None:
        for sums in self._sums if layer.weights else ():
            sums.settle([weight.name for weight in layer.weights])
