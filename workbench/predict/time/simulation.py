"""The simulation of an experiment's step on a machine: spans of every rank, and a breakdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Lane, Span
from workbench.plan.io.errors import MachineError
from workbench.plan.io.html import Markup, element, save
from workbench.plan.machine.machine import Machine
from workbench.predict.drawing import picture, spans_frame
from workbench.predict.time.duration import Seconds, Speeds
from workbench.predict.time.events import (
    AwaitCollective,
    BlockingCollective,
    Computation,
    StartedCollective,
)
from workbench.predict.time.step_events import Written, written
from workbench.predict.time.streams import Step, StragglerModel, Streams, TimedEvent, advanced
from workbench.program.rows import Representatives
from workbench.program.step import Program, reduced

if TYPE_CHECKING:
    import pandas

_MOST_RANKS = 8  # that are drawn

# The parts of the compute lane's time, which add up to the step.
PARTS = ("load", "forward", "loss", "backward", "communication", "wait", "update", "step")

WORK = ("load", "forward", "loss", "backward", "update", "step")

# Relative errors: of a step whose parts were measured, and of waiting and communication.
_WHOLE, _EXPOSED = 0.08, 0.25


@dataclass(frozen=True)
class Schedule:
    """One step, on all ranks of a world.

    Attributes:
        alike: the simulated ranks, and which rank of the world each of them represents.
        step: the step whose spans are shown.
        mean: pairs of (weight, step), whose weighted mean is the mean step.
    """

    alike: Representatives
    step: Step
    mean: tuple[tuple[float, Step], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.alike.world_size

    @cached_property
    def seconds(self) -> float:
        """Seconds of the mean step, on the slowest rank."""
        return float(np.sum([share * step.seconds for share, step in self.mean], axis=0).max())

    @cached_property
    def work(self) -> Seconds:
        """Seconds that each rank computes in the mean step [world size]."""
        total = np.zeros(len(self.alike.ranks))
        for share, step in self.mean:
            for happened in step.happened:
                if isinstance(happened.event, Computation):
                    total = total + share * happened.event.ends[-1]
        return total[self.alike.column]

    @cached_property
    def efficiency(self) -> float:
        """The share of the mean step in which ranks compute, the mean over ranks, 0 to 1."""
        return float(self.work.mean() / self.seconds) if self.seconds else 1.0

    @cached_property
    def beside(self) -> Seconds:
        """Seconds of the mean step in which a collective runs beside computation [world size]."""
        total = np.zeros(len(self.alike.ranks))
        for share, step in self.mean:
            for happened in step.happened:
                if isinstance(happened.event, StartedCollective):
                    total = total + share * (happened.end - happened.begin)
        return total[self.alike.column]

    @cached_property
    def parts(self) -> dict[str, Seconds]:
        """Seconds of the mean step for each of PARTS [simulated ranks]; they add up to it."""
        found = {part: [np.zeros((1, len(self.alike.ranks)))] for part in PARTS}
        for share, step in self.mean:
            for happened in step.happened:
                match happened.event:
                    case Computation(tasks):
                        lengths = np.diff(_ends(happened), axis=0, prepend=happened.arrive[None])
                        whats = [task.what for task in tasks]
                        for what in dict.fromkeys(whats):
                            own = [index for index, one in enumerate(whats) if one == what]
                            found[what].append(share * lengths[own])
                    case BlockingCollective():
                        found["wait"].append(share * (happened.begin - happened.arrive)[None])
                        sent = share * (happened.end - happened.begin)
                        found["communication"].append(sent[None])
                    case AwaitCollective():
                        found["wait"].append(share * (happened.end - happened.arrive)[None])
        return {part: np.cumsum(np.concatenate(own), axis=0)[-1] for part, own in found.items()}

    @cached_property
    def breakdowns(self) -> tuple[Mapping[str, float], ...]:
        """The breakdown of every rank; ranks with one representative share it."""
        found = [
            MappingProxyType({part: float(times[column]) for part, times in self.parts.items()})
            for column in range(len(self.alike.ranks))
        ]
        return tuple(found[column] for column in self.alike.column.tolist())

    def breakdown(self, rank: int) -> Mapping[str, float]:
        """Seconds of one rank's mean step for each of PARTS.

        A rank that the world does not have is an `IndexError`.
        """
        self._column(rank)
        return self.breakdowns[rank]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank in the step that is shown, by when they begin."""
        return tuple(sorted(self._spans(rank, self._column(rank)), key=lambda s: s.start_s))

    def shown(self, most: int = _MOST_RANKS) -> tuple[int, ...]:
        """The first ranks; in a large world, the first representatives."""
        if self.world_size <= most:
            return tuple(range(self.world_size))
        return tuple(self.alike.ranks[:most].tolist())

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each span of the ranks that are simulated, in seconds and bytes."""
        return spans_frame(span for rank in self.alike.ranks.tolist() for span in self.spans(rank))

    def svg(self) -> Markup:
        """The step of the first ranks that differ, as a picture; a document of its own."""
        return picture(
            {f"rank {rank:,}": self.spans(rank) for rank in self.shown()}, "Predicted step"
        )

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the picture, "x.html" a page, "x.csv" the spans.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    def __repr__(self) -> str:
        return f"<Schedule of {self.world_size:,} ranks: {self.seconds * 1e3:,.4g} ms a step>"

    def _repr_html_(self) -> Markup:
        return element("div", element("p", repr(self).strip("<>")), self.svg())

    def _column(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"no rank {rank}: there are 0 to {self.world_size - 1}")
        return int(self.alike.column[rank])

    def _spans(self, rank: int, column: int) -> Iterator[Span]:
        origin, sent = self.step.began.min(), -np.inf
        for happened in self.step.happened:
            arrive, begin, end = (
                float(times[column] - origin)
                for times in (happened.arrive, happened.begin, happened.end)
            )
            match happened.event:
                case Computation(tasks):
                    ends = _ends(happened)[:, column] - origin
                    for task, until in zip(tasks, ends.tolist(), strict=True):
                        if until > arrive:
                            yield Span(
                                rank, "compute", task.what, task.label, arrive, until - arrive
                            )
                        arrive = until
                case BlockingCollective(call) | StartedCollective(call):
                    if call.takes is not None and not call.takes[column]:
                        continue
                    beside = isinstance(happened.event, StartedCollective)
                    lane: Lane = "communication" if beside else "compute"
                    came = max(arrive, sent) if beside else arrive
                    sent = end if beside else sent
                    if begin > came:
                        yield Span(rank, lane, "wait", call.label, came, begin - came)
                    yield Span(
                        rank,
                        lane,
                        "collective",
                        call.label,
                        begin,
                        end - begin,
                        op=call.op,
                        phase=call.phase,
                        bytes=call.received(column, rank),
                    )
                case AwaitCollective(_, label) if end > arrive:
                    yield Span(rank, "compute", "wait", label, arrive, end - arrive)


def _ends(happened: TimedEvent) -> Seconds:
    """When each task of a computation was done [tasks, ranks]."""
    assert isinstance(happened.event, Computation)
    return advanced(happened.arrive, happened.event.ends, happened.beside)


@dataclass(frozen=True)
class Simulation:
    """A simulated step of an experiment on a machine.

    Attributes:
        schedule: the timeline of the step.
        layer_error: relative half width of the error band around the layers' seconds.
        estimated: the names of layers whose shapes the machine has not measured.
        algorithms: the algorithms of the all-reduces, by the name of what they reduce.
    """

    schedule: Schedule
    layer_error: float
    estimated: tuple[str, ...]
    algorithms: Mapping[str, tuple[str, ...]]

    @cached_property
    def error(self) -> float:
        """Relative half width of the error band around the step, a 95 % interval.

        Collectives and waiting are known less well than layers, since they depend on what else goes
        on. And a step whose layers were all measured is still not just their sum.
        """
        seconds = self.schedule.seconds
        if seconds == 0:
            return 0.0
        spent = {part: float(times.max()) for part, times in self.schedule.parts.items()}
        layers = self.layer_error * (spent["forward"] + spent["backward"])
        waited = _EXPOSED * (spent["communication"] + spent["wait"])
        return _WHOLE + (layers + waited) / seconds


def simulated(
    experiment: Experiment, machine: Machine, program: Program | None = None
) -> Simulation:
    """Simulates one step in the middle of a run.

    Args:
        experiment: the experiment that is simulated.
        machine: the machine that it runs on.
        program: the experiment's program, all of whose ranks are then simulated; None: one rank is
            simulated for each set of equal ones.

    Raises:
        MachineError: the machine has devices for another number of ranks.
    """
    check_ranks(machine, experiment.plan.world_size)
    own = program or reduced(experiment, Representatives.of(experiment, machine))
    ranks = own.ranks
    speeds = Speeds(machine, ranks.ranks.tolist())
    count = len(ranks.ranks)
    lanes = Streams(count, machine.slowdown, StragglerModel.on(machine, count))
    often, due = experiment.sync.timing.every, written(own, speeds)
    if often == 1:
        step = lanes.steady(due.events)
        return _simulation(Schedule(ranks, step, ((1.0, step),)), due)
    plain = written(own, speeds, due=False)
    step = lanes.steady(plain.events)
    shown, after = lanes.step(due.events), lanes.step(plain.events)
    mean = ((1 - 2 / often, step), (1 / often, shown), (1 / often, after))
    return _simulation(Schedule(ranks, shown, mean), due)


def _simulation(schedule: Schedule, of: Written) -> Simulation:
    return Simulation(schedule, of.error, of.estimated, of.algorithms)


def check_ranks(machine: Machine, world_size: int) -> None:
    """Checks that a machine has one device, or one for each rank.

    Raises:
        MachineError: the machine has devices for another number of ranks.
    """
    count = len(machine.devices)
    if count not in (1, world_size):
        raise MachineError(
            f"machine {machine.name!r} has {count} devices, one for each of {count} ranks, and the "
            f"plan is for {world_size}; a machine with one device is for any number of ranks"
        )
