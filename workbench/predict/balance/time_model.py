"""How long a device takes for d units of work: a functional performance model.

    constant    the speed of the largest measured size, for all sizes
    linear      straight between measured sizes
    akima       Akima's spline through them, which does not swing beside a sudden change

Below the smallest measured size time falls to (0, 0) in a straight line, and beyond the largest
one the last speed goes on. Time never falls as work grows: where measurements do, the largest
before counts.

Source: Lastovetsky and Reddy 2007 (doi:10.1177/1094342006074864); FuPerMod (Clarke et al. 2013).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.predict.balance.time_tables import Kind, tables

KINDS: tuple[Kind, ...] = ("constant", "linear", "akima")


@dataclass(frozen=True, order=True)
class Point:
    """One measurement: so many units took so many seconds."""

    units: int
    seconds: float

    def __post_init__(self) -> None:
        if self.units < 1 or not 0 <= self.seconds < math.inf:
            raise ValueError(f"a point has at least one unit and finite seconds >= 0, got {self!r}")


@dataclass(frozen=True)
class TimeModel:
    """Seconds of one device for any units of work.

    Attributes:
        points: measured, one for each size, ascending.
        kind: what is believed between them.

    Raises:
        ValueError: no points, or no such kind.
    """

    points: tuple[Point, ...]
    kind: Kind = "linear"

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a time model needs at least one measured point")
        if self.kind not in KINDS:
            raise ValueError(f"no time model {self.kind!r}; there are {', '.join(KINDS)}")
        latest = {point.units: point for point in self.points}
        object.__setattr__(self, "points", tuple(sorted(latest.values())))

    def with_points(self, points: Iterable[Point]) -> "TimeModel":
        """The model with further points; a size that is measured again is as it was last."""
        return TimeModel((*self.points, *points), self.kind)

    def seconds(self, most: int) -> NDArray[np.float64]:
        """Seconds for 0, 1, ... `most` units; the first is 0, and none is less than the one before.

        Args:
            most: units.
        """
        row: NDArray[np.float64] = seconds_of([self], most)[0]
        return row


def seconds_of(models: Sequence[TimeModel], most: int) -> NDArray[np.float64]:
    """Seconds [models, most + 1] for 0, 1, ... `most` units, of many models at once."""
    points = [np.array([(own.units, own.seconds) for own in model.points]) for model in models]
    return tables([model.kind for model in models], points, most)
