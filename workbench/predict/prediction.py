"""The prediction of a plan: memory, traffic and time of a step, before it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.plan.experiment.experiment import Experiment, Optimizer
from workbench.plan.experiment.question import experiment_of, required_plan
from workbench.plan.io.errors import MachineError
from workbench.plan.io.html import Markup, frame_of, save
from workbench.plan.machine.device import Device, Link
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.drawing import save_trace
from workbench.predict.memory.memory import Memory, memory_of
from workbench.predict.scaling import (
    MOST_RANKS,
    Point,
    Scaling,
    changed,
    elsewhere,
    point_of,
    scaling,
)
from workbench.predict.time.simulation import Schedule, Simulation, check_ranks, simulated
from workbench.predict.traffic.traffic import Traffic, traffic_of
from workbench.program.step import Program, program_of

if TYPE_CHECKING:
    import pandas


from workbench.plan.io.html import element, shortened, table, text_table
from workbench.predict.memory.timeline import CATEGORIES
from workbench.predict.time.simulation import PARTS

MIB = 2**20
_MEMORY = ("rank", "peak MiB", *(name.replace("_", " ") for name in CATEGORIES), "when")
_TRAFFIC = ("collective", "phase", "of", "calls", "messages", "kB received")
_TIME = ("rank", "step ms", *PARTS)
_LINES = 40


@dataclass(frozen=True)
class PredictionDisplay:
    """The contents of a prediction's display.

    Attributes:
        title: the title, in one line.
        memory: the memory of a step.
        traffic: the traffic of a step.
        simulation: the simulation of a step; None without a machine.
        underestimated: the names of layers that take longer than predicted.
    """

    title: str
    memory: Memory
    traffic: Traffic
    simulation: Simulation | None = None
    underestimated: tuple[str, ...] = ()

    def text(self) -> str:
        """All tables as text."""
        tables = []
        if self.simulation is not None:
            tables.append(text_table(_TIME, _time(self.simulation)))
        tables.append(text_table(_MEMORY, _memory(self.memory)))
        tables.append(text_table(_TRAFFIC, _traffic(self.traffic)))
        return "\n\n".join([self.title, *map("\n".join, tables), *self._notes()])

    def html(self) -> Markup:
        """All tables as HTML, with the timeline as a picture."""
        heading, _, rest = self.title.strip("<>").partition(": ")
        parts = []
        if self.simulation is not None:
            caption = "Where a step's time goes, ms"
            parts.append(self.simulation.schedule.svg())
            parts.append(table(_TIME, _time(self.simulation), caption))
        caption = "Memory at the highest point, MiB"
        parts.append(table(_MEMORY, _memory(self.memory), caption))
        caption = "Received in a step, by the rank that receives most"
        parts.append(table(_TRAFFIC, _traffic(self.traffic), caption))
        parts += [element("p", note) for note in self._notes()]
        return element("div", element("p", element("b", heading), f": {rest}."), *parts)

    def _notes(self) -> list[str]:
        """Warnings that a reader needs to judge the figures."""
        notes = []
        if self.memory.guessed:
            named = _named(self.memory.guessed)
            notes.append(
                f"Too little, perhaps: what {named} keep for their backward pass is not known."
            )
        least, most = self.memory.band
        if least < most:
            notes.append(
                f"Between {least / MIB:,.1f} and {most / MIB:,.1f} MiB at most: what kernels of "
                f"{_named(self.memory.unmeasured)} take beside their tensors is not measured. "
                "Machine.local(plan) and cluster.calibrate(plan) measure it."
            )
        if self.simulation is None:
            return notes
        if self.simulation.estimated:
            named = _named(self.simulation.estimated)
            notes.append(f"Estimated, for the machine has not measured such shapes: {named}.")
        if self.underestimated:
            named = _named(self.underestimated)
            notes.append(f"Too little: FLOPs of {named} are not known, and their time is left out.")
        sums = [
            f"{what} by {' or '.join(name.replace('_', '-') for name in names)}"
            for what, names in self.simulation.algorithms.items()
        ]
        if sums:
            notes.append(f"All-reduces: {'; '.join(sums[:6])}.")
        return notes


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _time(simulation: Simulation) -> list[tuple[str, ...]]:
    schedule = simulation.schedule
    rows: list[tuple[str, ...]] = []
    for rank in range(min(_LINES, schedule.world_size)):
        parts = schedule.breakdown(rank)
        sizes = (sum(parts.values()), *parts.values())
        rows.append((str(rank), *(f"{seconds * 1e3:,.3f}" for seconds in sizes)))
    return shortened(rows, schedule.world_size, "ranks")


def _memory(memory: Memory) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rank in memory.ranks[:_LINES]:
        sizes = (rank.peak_bytes, *rank.categories.values())
        rows.append((str(rank.rank), *(f"{n / MIB:,.1f}" for n in sizes), str(rank.moment)))
    return shortened(rows, len(memory.ranks), "ranks")


def _traffic(traffic: Traffic) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in traffic.collectives[:_LINES]:
        often = "" if one.every == 1 else f" every {one.every} steps"
        counts = (f"{max(one.calls):,}", f"{max(one.messages):,}", f"{max(one.bytes) / 1e3:,.1f}")
        rows.append((one.op, one.phase + often, one.layer, *counts))
    return shortened(rows, len(traffic.collectives), "collectives")


# Up to here all ranks are simulated: their program is made for memory and traffic anyway.
_FEW_RANKS = 32
_MOST_TRACED = 64
_NAMED = {"step": "overhead"}  # what belongs to no other part of a step


@dataclass(frozen=True)
class Prediction:
    """Memory, traffic and time of one step of an experiment.

    Attributes:
        experiment: the experiment that is predicted.
        machine: the machine that runs it; None: only memory and traffic are predicted.
    """

    experiment: Experiment
    machine: Machine | None = None

    @cached_property
    def program(self) -> Program:
        """The instructions that the ranks execute."""
        hosts = None if self.machine is None else self.machine.ranks_per_host
        return program_of(self.experiment, hosts)

    @cached_property
    def memory(self) -> Memory:
        """The memory of every rank, in bytes for each category and layer."""
        return memory_of(self.program, self.machine)

    @cached_property
    def traffic(self) -> Traffic:
        """The messages and bytes that every rank receives in every collective."""
        return traffic_of(self.program)

    @cached_property
    def simulation(self) -> Simulation:
        """One simulated step, and how certain its times are.

        Raises:
            MachineError: there is no machine.
        """
        if self.machine is None:
            raise MachineError(
                "time needs a machine: predict(plan, machine, experiment), where a machine is "
                "Machine.preset(name), Machine.load(path) or what cluster.calibrate() measures"
            )
        few = self.experiment.plan.world_size <= _FEW_RANKS
        return simulated(self.experiment, self.machine, self.program if few else None)

    @property
    def timeline(self) -> Schedule:
        """The timeline of every rank, in one step in the middle of a run."""
        return self.simulation.schedule

    @property
    def step_time(self) -> float:
        """Seconds of a step; for local SGD the mean, averaging steps included."""
        return self.timeline.seconds

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.experiment.batch_size / self.step_time

    @property
    def efficiency(self) -> float:
        """The share of a step in which ranks compute, the mean over ranks, 0 to 1."""
        return self.timeline.efficiency

    @property
    def breakdown(self) -> tuple[Mapping[str, float], ...]:
        """Seconds of each rank's step for each of `schedule.PARTS`, which add up to it [ranks]."""
        return self.timeline.breakdowns

    @property
    def error(self) -> float:
        """Relative half width of the error band around the step time, a 95 % interval."""
        return self.simulation.error

    @property
    def estimated(self) -> tuple[str, ...]:
        """The names of layers whose shapes the machine has not measured."""
        return self.simulation.estimated

    @property
    def underestimated(self) -> tuple[str, ...]:
        """The names of estimated layers with unknown FLOPs: they take longer than predicted."""
        graph = self.experiment.plan.graph
        return tuple(name for name in self.estimated if graph[name].uncounted)

    def at(
        self,
        *,
        world_size: int | None = None,
        link: Link | str | None = None,
        device: Device | str | None = None,
        batch_size: int | None = None,
    ) -> "Prediction":
        """The prediction for another world, link, device or batch; what is not given stays.

        Args:
            world_size: the number of ranks, up to 65,536; the plan keeps its schemes and group
                sizes.
            link: the link between hosts, or on one host between ranks: a `Link`, or the name of a
                known machine that has it.
            device: the device of all ranks: a `Device`, or the name of a known machine that has it.
            batch_size: the samples of a step over all ranks.

        Raises:
            PlanError: a group size does not divide `world_size`.
            ExperimentError: a world or a batch that is not valid.
            MachineError: the machine has devices for another number of ranks; no known machine
                has this name; or there is no machine to change.
        """
        machine = self.machine
        if machine is None and (link is not None or device is not None):
            raise MachineError(
                "another link or device needs a machine: predict(plan, machine, ...)"
            )
        if machine is not None:
            machine = elsewhere(machine, link, device)
        experiment = changed(self.experiment, world_size, batch_size)
        if machine is not None:
            check_ranks(machine, experiment.plan.world_size)
        return Prediction(experiment, machine)

    def strong_scaling(self, sizes: Sequence[int]) -> Scaling:
        """Predicts the same batch over other numbers of ranks.

        Args:
            sizes: the world sizes, ascending.

        Raises:
            PlanError, ExperimentError, MachineError: the causes of `at`.
        """
        batch, world = self.experiment.batch_size, self.experiment.plan.world_size
        return scaling("strong", sizes, self._point, batch, world)

    def weak_scaling(self, sizes: Sequence[int]) -> Scaling:
        """Predicts other numbers of ranks, each with as many samples as now.

        Args:
            sizes: the world sizes, ascending.

        Raises:
            PlanError, ExperimentError, MachineError: the causes of `at`.
        """
        batch, world = self.experiment.batch_size, self.experiment.plan.world_size
        return scaling("weak", sizes, self._point, batch, world)

    @cached_property
    def communication_dominates_at(self) -> int | None:
        """The first world size where communication and waiting take longer than work.

        The batch stays, and the world is doubled from the plan's own up to 65,536 ranks; None: work
        takes longer in all of these.
        """
        size = self.experiment.plan.world_size
        while size <= MOST_RANKS:
            point = self._point(size, self.experiment.batch_size)
            if point.exposed_s > point.work_s:
                return size
            size *= 2
        return None

    def save_trace(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Writes the step for chrome://tracing and ui.perfetto.dev, lane by lane.

        Args:
            path: the path of the JSON file.
            ranks: the ranks to write; None: all, or of more than 64 ranks the first 64
                representatives.
        """
        chosen = self.timeline.shown(_MOST_TRACED) if ranks is None else ranks
        spans = (span for rank in chosen for span in self.timeline.spans(rank))
        save_trace(spans, path)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each rank: seconds of a step, bytes at the peak, bytes received in a step.

        Of a larger world than 64 ranks, a line for the ranks that stand for the others.
        """
        schedule = None if self.machine is None else self.timeline
        rows = []
        for rank in self.memory.ranks.kept:
            parts = {} if schedule is None else schedule.breakdown(rank.rank)
            rows.append(
                {
                    "rank": rank.rank,
                    **({"step_s": sum(parts.values())} if parts else {}),
                    **{f"{_NAMED.get(name, name)}_s": value for name, value in parts.items()},
                    "peak_bytes": rank.peak_bytes,
                    "least_peak_bytes": rank.band[0],
                    "most_peak_bytes": rank.band[1],
                    **{f"{name}_bytes": count for name, count in rank.categories.items()},
                    "received_bytes": self.traffic.received_bytes(rank.rank),
                }
            )
        return frame_of(rows, list(rows[0]))

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the timeline, "x.html" a page, "x.csv" the table.

        Without a machine, the picture is the table of memory and traffic.

        Raises:
            ValueError: the name has another ending.
        """
        timed = None if self.machine is None else self.timeline.svg
        save(self, path, timed)

    def _point(self, world_size: int, batch_size: int) -> Point:
        there = self.at(world_size=world_size, batch_size=batch_size)
        return point_of(there.experiment, there.timeline)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without cached values

    def __repr__(self) -> str:
        plan = self.experiment.plan
        peak, bytes_ = self._in_memory(), self.traffic.most_received_bytes
        timed = "" if self.machine is None else f"{self._in_time()}; "
        return (
            f"<Prediction {plan.graph.source.name} on {plan.world_size:,} ranks: {timed}at most "
            f"{peak} and {bytes_ / 1e6:,.2f} MB received per rank and step>"
        )

    def _in_memory(self) -> str:
        peak, (least, most) = self.memory.peak_bytes, self.memory.band
        band = f" ({least / 2**20:,.1f} .. {most / 2**20:,.1f})" if least < most else ""
        return f"{peak / 2**20:,.1f} MiB{band}"

    def _in_time(self) -> str:
        band = f" ± {self.error * 100:.0f} %" if self.error else ""
        band += " or more" * bool(self.underestimated)
        return (
            f"{self.step_time * 1e3:,.2f} ms per step{band}, {self.samples_per_s:,.0f} samples/s, "
            f"efficiency {self.efficiency * 100:.0f} %"
        )

    def __str__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> Markup:
        return self._shown().html()

    def _shown(self) -> PredictionDisplay:
        simulation = None if self.machine is None else self.simulation
        below = () if simulation is None else self.underestimated
        return PredictionDisplay(repr(self), self.memory, self.traffic, simulation, below)


def predict(
    plan: Plan | Experiment,
    machine: Machine | None = None,
    experiment: Experiment | None = None,
    *,
    batch_size: int | None = None,
    optimizer: Optimizer | str | None = None,
    precision: str | None = None,
) -> Prediction:
    """Predicts the cost of a plan from its shapes alone: nothing runs, and torch is not loaded.

    Args:
        plan: the plan; or an experiment, whose own plan is meant.
        machine: the machine that runs it; None: only memory and traffic. Traffic is the same on
            all machines; of memory, what kernels take beside their tensors is known of a machine
            that has measured it, else there is a band around the peak.
        experiment: the experiment that runs it; its own plan is replaced by `plan`. None: a step
            of momentum SGD with 32 samples for each rank.
        batch_size: the samples of a step over all ranks, instead of the experiment's.
        optimizer: the optimizer, instead of the experiment's.
        precision: the precision, instead of the experiment's.

    Raises:
        PlanError: no plan.
        ExperimentError: no experiment, or one that cannot run this plan; or two.
        MachineError: no machine, or one that has devices for another number of ranks.
    """
    chosen = required_plan("predict", plan)
    if machine is not None:
        if not isinstance(machine, Machine):
            raise MachineError(f"predict needs a Machine or None, got {machine!r}")
        check_ranks(machine, chosen.world_size)
    step = experiment_of(
        "predict",
        plan,
        chosen,
        experiment,
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,
    )
    return Prediction(step, machine)
