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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import Akima1DInterpolator

Kind = Literal["constant", "linear", "akima"]
KINDS: tuple[Kind, ...] = ("constant", "linear", "akima")
_ENOUGH = 3  # points, with that of no work, from which on Akima's spline is another than lines


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
        units = np.arange(most + 1, dtype=np.float64)
        x = np.array([0, *(point.units for point in self.points)], dtype=np.float64)
        y = np.array([0.0, *(point.seconds for point in self.points)])
        speed = y[-1] / x[-1]
        if self.kind == "constant":
            return units * speed
        if self.kind == "akima" and len(x) >= _ENOUGH:
            times = Akima1DInterpolator(x, y)(units)
        else:
            times = np.interp(units, x, y)
        times = np.where(units < x[1], units * y[1] / x[1], times)
        times = np.where(units > x[-1], units * speed, times)
        return np.maximum.accumulate(np.maximum(times, 0.0))
