"""The events of one step in time, instruction by instruction of its program."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.predict.time.duration import Speeds, load_seconds
from workbench.predict.time.events import Event, Script
from workbench.predict.time.layer_times import LayerTimes
from workbench.predict.time.pass_events import PassEvents
from workbench.predict.time.replicas import Replicas
from workbench.predict.time.update_events import Updates
from workbench.program.instructions import (
    Agree,
    Average,
    Backward,
    Convert,
    Forward,
    HandOut,
    Instruction,
    Load,
    Loss,
    Prefetch,
    Recompute,
    Reduce,
    Update,
    Wait,
)
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


def written(program: Program, speeds: Speeds, *, averaging: bool = False) -> Written:
    """The events of a step on the ranks that stand for a world.

    Args:
        program: of these ranks.
        speeds: of them.
        averaging: whether local SGD averages in this step.
    """
    return _Step(program, speeds, averaging).written()


class _Step:
    def __init__(self, program: Program, speeds: Speeds, averaging: bool) -> None:
        self.program, self.speeds, self.averaging = program, speeds, averaging
        self.script = Script()
        self.times = LayerTimes(program.plan, program.experiment.precision, speeds)
        self.replicas = Replicas(program.ranks, speeds)
        self.updates = Updates(program, self.replicas, self.script)
        self._passes: dict[Rows, PassEvents] = {}
        self._begun: set[int] = set()  # prefetches that are worth it

    def written(self) -> Written:
        for index, instruction in enumerate(self.program.instructions):
            self._write(index, instruction)
        self.updates.rest()
        algorithms = {label: tuple(names) for label, names in self.replicas.algorithms.items()}
        estimated = tuple(self.times.estimated)
        return Written(self.script.events(), self.times.error, estimated, algorithms)

    def _write(self, index: int, instruction: Instruction) -> None:
        match instruction:
            case Forward(operation, on):
                self._passing(on.rows).forward(operation)
            case Backward(operation, on, adds, gradients):
                self._passing(on.rows).backward(operation, gradients, adds=adds)
            case Convert(operation, on, "forward", prefetch):
                begun = prefetch if prefetch in self._begun else None
                self._passing(on.rows).convert(operation, begun)
            case Convert(operation, on, "backward", _, gradients):
                self._passing(on.rows).convert_back(operation, gradients)
            case Recompute(_, operations, on):
                self._passing(on.rows).again(operations)
            case Loss(_, on):
                self._passing(on.rows).loss()
            case Load(rows):
                self._load(rows)
            case Prefetch(operation, on):
                if self._passing(on.rows).start_gather(operation, index):
                    self._begun.add(index)
            case Reduce():
                self.updates.reduce(index)
            case Wait():
                self.updates.wait(instruction)
            case Agree():
                self.updates.agree()
            case Update():
                self.updates.update(instruction)
            case HandOut():
                self.updates.hand_out(instruction)
            case Average() if self.averaging:
                self.updates.average(instruction)

    def _load(self, rows: Rows) -> None:
        sample = int(np.prod(self.program.plan.graph.input_shape)) * self.program.itemsize
        self.script.work("load", "input", load_seconds(rows.own * sample, self.speeds))

    def _passing(self, rows: Rows) -> PassEvents:
        known = self._passes.get(rows)
        if known is None:
            known = PassEvents(self.program, self.replicas, self.script, rows, self.times)
            self._passes[rows] = known
        return known
