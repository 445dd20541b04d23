"""A step's time over world sizes: strong and weak scaling, and where communication dominates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import Experiment
from workbench.predict.tables import html_table, text_table
from workbench.predict.time.schedule import Schedule

_HEAD = ("ranks", "batch", "step ms", "samples/s", "speed-up", "efficiency %", "exposed ms")


@dataclass(frozen=True)
class Point:
    """One world size.

    Attributes:
        world_size: number of ranks.
        batch_size: samples of a step over all ranks.
        step_time: seconds.
        samples_per_s: of all ranks.
        efficiency: the share of all ranks' time that goes into work.
        exposed_s: seconds of a step that communication and waiting add, of the mean rank.
        work_s: seconds of a step without these, of the mean rank.
    """

    world_size: int
    batch_size: int
    step_time: float
    samples_per_s: float
    efficiency: float
    exposed_s: float
    work_s: float


def point_of(experiment: Experiment, schedule: Schedule) -> Point:
    """One point of a curve."""
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


@dataclass(frozen=True)
class Scaling:
    """A step's time over world sizes.

    Attributes:
        kind: "strong": the same batch over more ranks; "weak": each rank's part is the same.
        points: by world size.
    """

    kind: Literal["strong", "weak"]
    points: tuple[Point, ...]

    @property
    def communication_dominates_at(self) -> int | None:
        """The first of these world sizes where communication and waiting take more than work."""
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

    def _repr_html_(self) -> str:
        return f"<div>{html_table(repr(self).strip('<>'), _HEAD, self._rows())}</div>"

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
    """A curve.

    Args:
        kind: of scaling.
        sizes: world sizes, ascending.
        at: gives the point of a world size and a batch.
        batch_size: of the experiment.
        world_size: of the experiment.

    Raises:
        ExperimentError: no sizes, or sizes that do not ascend.
    """
    if not sizes or any(b <= a for a, b in pairwise(sizes)):
        raise ExperimentError(f"world sizes must ascend, got {tuple(sizes)}")
    grown = (batch_size if kind == "strong" else round(batch_size * n / world_size) for n in sizes)
    return Scaling(kind, tuple(at(n, batch) for n, batch in zip(sizes, grown, strict=True)))
