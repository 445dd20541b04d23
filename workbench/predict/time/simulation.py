"""From an experiment and a machine to a step in time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from workbench.plan.errors import MachineError
from workbench.plan.experiment import Experiment, LocalSGD
from workbench.plan.machine import Machine
from workbench.predict.time.duration import Speeds
from workbench.predict.time.lagging import Lagging
from workbench.predict.time.lanes import Lanes
from workbench.predict.time.schedule import Schedule
from workbench.predict.time.step_events import Written, written
from workbench.program.representatives import Representatives
from workbench.program.step import Program, reduced

# Relative errors: of a step whose parts were measured, and of what ranks wait and communicate.
_WHOLE, _EXPOSED = 0.08, 0.25


@dataclass(frozen=True)
class Simulation:
    """A step of an experiment on a machine.

    Attributes:
        schedule: it, in time.
        layer_error: relative half width of the band around its layers' seconds.
        estimated: layers of shapes that the machine has not measured.
        algorithms: of the all-reduces, by what they sum.
    """

    schedule: Schedule
    layer_error: float
    estimated: tuple[str, ...]
    algorithms: Mapping[str, tuple[str, ...]]

    @cached_property
    def error(self) -> float:
        """Relative half width of the band around the step, in which 95 % are expected.

        What a step takes besides its layers is known less well: exchanges and waiting depend on
        what else goes on. Nor is a step that consists of what was measured just the sum of it.
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
    """One step in the middle of a run.

    Args:
        experiment: whose.
        machine: what it runs on.
        program: of the experiment, all of whose ranks are then simulated; None: of ranks that
            are alike, one stands for all.

    Raises:
        MachineError: the machine has devices for another number of ranks.
    """
    check_ranks(machine, experiment.plan.world_size)
    own = program or reduced(experiment, Representatives.of(experiment, machine))
    ranks = own.ranks
    speeds = Speeds(machine, ranks.ranks.tolist())
    count = len(ranks.ranks)
    lanes = Lanes(count, machine.slowdown, Lagging.on(machine, count))
    plain = written(own, speeds)
    step = lanes.steady(plain.events)
    if not isinstance(experiment.sync, LocalSGD):
        return _simulation(Schedule(ranks, step, ((1.0, step),)), plain)
    averaging = written(own, speeds, averaging=True)
    often = experiment.sync.every
    if often == 1:
        shown = lanes.steady(averaging.events)
        return _simulation(Schedule(ranks, shown, ((1.0, shown),)), averaging)
    shown, after = lanes.step(averaging.events), lanes.step(plain.events)
    mean = ((1 - 2 / often, step), (1 / often, shown), (1 / often, after))
    return _simulation(Schedule(ranks, shown, mean), averaging)


def _simulation(schedule: Schedule, of: Written) -> Simulation:
    return Simulation(schedule, of.error, of.estimated, of.algorithms)


def check_ranks(machine: Machine, world_size: int) -> None:
    """Refuses a machine of another number of ranks."""
    count = len(machine.devices)
    if count not in (1, world_size):
        raise MachineError(
            f"machine {machine.name!r} has {count} devices, one for each of {count} ranks, and the "
            f"plan is for {world_size}; a machine with one device is for any number of ranks"
        )
