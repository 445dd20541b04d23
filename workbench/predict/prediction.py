"""What is known of a plan before it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.plan.device import Device
from workbench.plan.errors import ExperimentError, MachineError
from workbench.plan.experiment import Experiment
from workbench.plan.link import Link
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict import chrome
from workbench.predict.drawing import shown_ranks
from workbench.predict.memory.memory import Memory, memory_of
from workbench.predict.scaling import Point, Scaling, point_of, scaling
from workbench.predict.show import Shown
from workbench.predict.time.schedule import Schedule
from workbench.predict.time.simulation import Simulation, check_ranks, simulated
from workbench.predict.traffic.counting import traffic_of
from workbench.predict.traffic.traffic import Traffic
from workbench.predict.what_if import MOST_RANKS, changed, elsewhere
from workbench.program.step import Program, program_of

# Up to here all ranks are simulated: what they execute is written for memory and traffic anyhow.
_FEW_RANKS = 32
_MOST_TRACED = 64


@dataclass(frozen=True)
class Prediction:
    """Memory, traffic and time of one step of an experiment.

    Attributes:
        experiment: whose.
        machine: that runs it; None: memory and traffic alone are known.
    """

    experiment: Experiment
    machine: Machine | None = None

    @cached_property
    def program(self) -> Program:
        """What its ranks execute."""
        hosts = None if self.machine is None else self.machine.ranks_per_host
        return program_of(self.experiment, hosts)

    @cached_property
    def memory(self) -> Memory:
        """On every rank, in bytes of each category and layer."""
        return memory_of(self.program)

    @cached_property
    def traffic(self) -> Traffic:
        """What every collective brings to every rank."""
        return traffic_of(self.program)

    @cached_property
    def simulation(self) -> Simulation:
        """One step in time, and how well it is known.

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
        """What every rank does when, in one step in the middle of a run."""
        return self.simulation.schedule

    @property
    def step_time(self) -> float:
        """Seconds from one step to the next; of local SGD in the mean, averagings included."""
        return self.timeline.seconds

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.experiment.batch_size / self.step_time

    @property
    def efficiency(self) -> float:
        """The share of all ranks' time that would be left without communication and waiting."""
        return self.timeline.efficiency

    @property
    def breakdown(self) -> tuple[Mapping[str, float], ...]:
        """For each rank, seconds of `schedule.PARTS`, which add up to a step."""
        return self.timeline.breakdowns

    @property
    def error(self) -> float:
        """Relative half width of the band around the step time, in which 95 % are expected."""
        return self.simulation.error

    @property
    def estimated(self) -> tuple[str, ...]:
        """Layers of shapes that the machine has not measured."""
        return self.simulation.estimated

    @property
    def underestimated(self) -> tuple[str, ...]:
        """Of these, the layers whose FLOPs are not known: they take longer than is predicted."""
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
        """The same elsewhere; what is not given stays as it is.

        Args:
            world_size: ranks, up to 65,536; the plan keeps its schemes and group sizes.
            link: between hosts, or on one host between ranks: a link, or the name of a known
                machine whose link it is.
            device: of all ranks: a device, or the name of a known machine whose device it is.
            batch_size: samples of a step over all ranks.

        Raises:
            PlanError: a group size does not divide `world_size`.
            ExperimentError: a world or a batch that cannot be.
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
        """The same batch over other numbers of ranks.

        Args:
            sizes: world sizes, ascending.

        Raises:
            PlanError, ExperimentError, MachineError: as `at`.
        """
        batch, world = self.experiment.batch_size, self.experiment.plan.world_size
        return scaling("strong", sizes, self._point, batch, world)

    def weak_scaling(self, sizes: Sequence[int]) -> Scaling:
        """Other numbers of ranks, each with as many samples as now.

        Args:
            sizes: world sizes, ascending.

        Raises:
            PlanError, ExperimentError, MachineError: as `at`.
        """
        batch, world = self.experiment.batch_size, self.experiment.plan.world_size
        return scaling("weak", sizes, self._point, batch, world)

    @cached_property
    def communication_dominates_at(self) -> int | None:
        """The first world size where communication and waiting take more than work.

        The batch stays, and the world is that of the plan, twice as large, and so on up to 65,536
        ranks; None: in none of these.
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
            path: of a JSON file.
            ranks: whose; None: all, or of more than 64 the first of those that stand for them.
        """
        chosen = shown_ranks(self.timeline, _MOST_TRACED) if ranks is None else ranks
        spans = (span for rank in chosen for span in self.timeline.spans(rank))
        chrome.save_trace(spans, path)

    def _point(self, world_size: int, batch_size: int) -> Point:
        there = self.at(world_size=world_size, batch_size=batch_size)
        return point_of(there.experiment, there.timeline)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # not what is cached

    def __repr__(self) -> str:
        plan = self.experiment.plan
        peak, bytes_ = self.memory.peak_bytes, self.traffic.most_received_bytes
        timed = "" if self.machine is None else f"{self._in_time()}; "
        return (
            f"<Prediction {plan.graph.source.name} on {plan.world_size:,} ranks: {timed}at most "
            f"{peak / 2**20:,.1f} MiB and {bytes_ / 1e6:,.2f} MB received per rank and step>"
        )

    def _in_time(self) -> str:
        band = f" ± {self.error * 100:.0f} %" if self.error else ""
        band += " or more" * bool(self.underestimated)
        return (
            f"{self.step_time * 1e3:,.2f} ms per step{band}, {self.samples_per_s:,.0f} samples/s, "
            f"efficiency {self.efficiency * 100:.0f} %"
        )

    def __str__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        simulation = None if self.machine is None else self.simulation
        below = () if simulation is None else self.underestimated
        return Shown(repr(self), self.memory, self.traffic, simulation, below)


def predict(
    plan: Plan, machine: Machine | None = None, experiment: Experiment | None = None
) -> Prediction:
    """What a plan will need, from its shapes alone: nothing runs, and torch is not loaded.

    Args:
        plan: the plan.
        machine: that runs it; None: memory and traffic alone, which are the same on all machines
            with these kernels.
        experiment: how it is run; its own plan is put aside for `plan`.

    Raises:
        ExperimentError: no experiment, or one that cannot run this plan.
        MachineError: no machine, or one that has devices for another number of ranks.
    """
    if not isinstance(experiment, Experiment):
        raise ExperimentError(
            f"predict needs an Experiment (batch size, optimizer, precision), got {experiment!r}"
        )
    if machine is not None:
        if not isinstance(machine, Machine):
            raise MachineError(f"predict needs a Machine or None, got {machine!r}")
        check_ranks(machine, plan.world_size)
    return Prediction(experiment.replace(plan=plan), machine)
