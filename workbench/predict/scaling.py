"""Step times over world sizes: strong and weak scaling, and where communication dominates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.plan.io.html import Markup, element, frame_of, save, table, text_table
from workbench.plan.machine.device import Device, Link
from workbench.plan.machine.machine import Machine
from workbench.predict.time.simulation import Schedule

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Point:
    """The predicted step at one world size.

    Attributes:
        world_size: number of ranks.
        batch_size: the samples of a step over all ranks.
        step_time: seconds of a step.
        samples_per_s: samples per second of all ranks.
        efficiency: the share of a step in which ranks compute, the mean over ranks, 0 to 1.
        exposed_s: seconds of a step that communication and waiting add, on the mean rank.
        work_s: seconds of a step without these, on the mean rank.
    """

    world_size: int
    batch_size: int
    step_time: float
    samples_per_s: float
    efficiency: float
    exposed_s: float
    work_s: float


@dataclass(frozen=True)
class Scaling:
    """The time of a step over world sizes.

    Attributes:
        kind: "strong": the same batch over more ranks; "weak": each rank's part is the same.
        points: the predicted steps, by world size.
    """

    kind: Literal["strong", "weak"]
    points: tuple[Point, ...]

    @property
    def communication_dominates_at(self) -> int | None:
        """The first of these world sizes where communication and waiting take longer than work."""
        return next((p.world_size for p in self.points if p.exposed_s > p.work_s), None)

    def speedup(self, point: Point) -> float:
        """Samples per second, relative to the first point."""
        return point.samples_per_s / self.points[0].samples_per_s

    def __repr__(self) -> str:
        sizes = f"{self.points[0].world_size:,} to {self.points[-1].world_size:,} ranks"
        at = self.communication_dominates_at
        said = "never dominates" if at is None else f"dominates from {at:,} ranks on"
        return f"<{self.kind.capitalize()} scaling over {sizes}: communication {said}>"

    def __str__(self) -> str:
        return "\n".join([repr(self), "", *text_table(_HEAD, self._rows())])

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each world size, in seconds."""
        rows = ({**vars(point), "speedup": self.speedup(point)} for point in self.points)
        return frame_of(rows, [*(f.name for f in fields(Point)), "speedup"])

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return element("div", table(_HEAD, self._rows(), repr(self).strip("<>")))

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{point.world_size:,}",
                f"{point.batch_size:,}",
                f"{point.step_time * 1e3:,.3f}",
                f"{point.samples_per_s:,.0f}",
                f"{self.speedup(point):,.2f}",
                f"{point.efficiency * 100:.1f}",
                f"{point.exposed_s * 1e3:,.3f}",
            )
            for point in self.points
        ]


def scaling(
    kind: Literal["strong", "weak"],
    sizes: Sequence[int],
    at: Callable[[int, int], Point],
    batch_size: int,
    world_size: int,
) -> Scaling:
    """Predicts a scaling curve.

    Args:
        kind: the kind of scaling, "strong" or "weak".
        sizes: the world sizes, ascending.
        at: a function that gives the point of a world size and a batch size.
        batch_size: the samples of a step in the experiment.
        world_size: the number of ranks in the experiment.

    Raises:
        ExperimentError: no sizes, or sizes that do not ascend.
    """
    if not sizes or any(b <= a for a, b in pairwise(sizes)):
        raise ExperimentError(f"world sizes must ascend, got {tuple(sizes)}")
    grown = (batch_size if kind == "strong" else round(batch_size * n / world_size) for n in sizes)
    return Scaling(kind, tuple(at(n, batch) for n, batch in zip(sizes, grown, strict=True)))


_HEAD = ("ranks", "batch", "step ms", "samples/s", "speed-up", "efficiency %", "exposed ms")


def point_of(experiment: Experiment, schedule: Schedule) -> Point:
    """The point of a scaling curve for one experiment."""
    seconds, work = schedule.seconds, float(schedule.work.mean())
    return Point(
        experiment.plan.world_size,
        experiment.batch_size,
        seconds,
        experiment.batch_size / seconds,
        schedule.efficiency,
        seconds - work,
        work,
    )


MOST_RANKS = 65_536


def changed(experiment: Experiment, world_size: int | None, batch_size: int | None) -> Experiment:
    """The experiment on another number of ranks, or with another batch.

    Raises:
        PlanError: a group size of the plan does not divide the number of ranks.
        ExperimentError: more than 65,536 ranks, or a batch that cannot be.
    """
    plan = experiment.plan
    if world_size is not None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ExperimentError(f"world_size must be a positive integer, got {world_size!r}")
        if world_size > MOST_RANKS:
            raise ExperimentError(f"at most {MOST_RANKS:,} ranks are predicted, got {world_size:,}")
        plan = plan.with_world_size(world_size)
    batch = experiment.batch_size if batch_size is None else batch_size
    return experiment.replace(plan=plan, batch_size=batch)


def elsewhere(machine: Machine, link: Link | str | None, device: Device | str | None) -> Machine:
    """The machine with another link, or with another device on all ranks.

    Args:
        machine: the machine that is changed.
        link: the link between its hosts, where there are several, and else between its ranks; or
            the name of a known machine that has it.
        device: the device of all ranks; or the name of a known machine that has it.

    Raises:
        MachineError: no known machine of this name, or something else than these.
    """
    fields: dict[str, object] = {}
    if link is not None:
        where = "within" if machine.ranks_per_host is None else "across"
        fields[where] = _link(link, where)
    if device is not None:
        fields["devices"] = (_device(device),)
    return machine.replace(**fields) if fields else machine


def _link(link: Link | str, where: str) -> Link:
    if isinstance(link, str):
        known = Machine.preset(link)
        return known.across or known.within if where == "across" else known.within
    if not isinstance(link, Link):
        raise MachineError(f"link must be a Link or the name of a known machine, got {link!r}")
    return link


def _device(device: Device | str) -> Device:
    if isinstance(device, str):
        return Machine.preset(device).devices[0]
    if not isinstance(device, Device):
        raise MachineError(f"device must be a Device or a known machine's name, got {device!r}")
    return device
