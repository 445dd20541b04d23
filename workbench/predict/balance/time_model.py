"""The time that a device takes for d units of work: a functional performance model.

    constant    the speed of the largest measured size, for all sizes
    linear      straight between measured sizes
    akima       Akima's spline through them, which does not swing beside a sudden change

Below the smallest measured size time falls to (0, 0) in a straight line, and beyond the largest one
the last speed holds. Time never falls as work grows: where measurements do, the largest so far
counts.

Source: Lastovetsky and Reddy 2007 (doi:10.1177/1094342006074864); FuPerMod (Clarke et al. 2013).

A model is a row of pieces, each a cubic from one measured size to the next; lines and constant
speeds are cubics, too. The pieces of all devices are concatenated in flat arrays, so that
evaluation costs the same whatever sizes each device was measured at.

Source: Akima 1970 (doi:10.1145/321607.321609) for the tangents of its spline. Scipy's
`Akima1DInterpolator`, one for each device, gives equal values and takes 3 to 13 times as long.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["constant", "linear", "akima"]


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
    """Seconds of one device for any number of units.

    Attributes:
        points: the measured points, one for each size, ascending.
        kind: the kind of interpolation between them: "constant", "linear" or "akima".

    Raises:
        ValueError: no points, or an unknown kind.
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
        """The model with further points; the last measurement of a size counts."""
        return TimeModel((*self.points, *points), self.kind)

    def seconds(self, most: int) -> NDArray[np.float64]:
        """Seconds for 0, 1, ... `most` units [most + 1], from 0 and never falling.

        Args:
            most: the largest number of units.
        """
        row: NDArray[np.float64] = seconds_of([self], most)[0]
        return row


Floats = NDArray[np.float64]

_ENOUGH = 3  # points, (0, 0) included, from which on Akima's spline differs from lines

_STRAIGHT = 1e-9  # of the largest bend of a curve: less is none


def tables(kinds: Sequence[Kind], points: Sequence[Floats], most: int) -> Floats:
    """Seconds for 0, 1, ... `most` units, never falling [devices, most + 1].

    Args:
        kinds: the kind of each device's model [devices].
        points: the points of each device, units ascending from 1, and seconds [devices of [sizes,
            2]].
        most: the largest number of units.
    """
    found = np.empty((len(kinds), most + 1))
    alike: dict[tuple[Kind, int], list[int]] = {}
    for device, (kind, own) in enumerate(zip(kinds, points, strict=True)):
        alike.setdefault((kind, len(own)), []).append(device)
    for (kind, count), devices in alike.items():
        measured = np.zeros((len(devices), count + 1, 2))
        measured[:, 1:] = [points[device] for device in devices]
        found[devices] = _evaluated(kind, measured[:, :, 0], measured[:, :, 1], most)
    return np.maximum.accumulate(np.maximum(found, 0.0), axis=1)


def _evaluated(kind: Kind, x: Floats, y: Floats, most: int) -> Floats:
    """Seconds of devices with equally many points [devices, sizes], the first being (0, 0)."""
    last = y[:, -1:] / x[:, -1:]
    width = np.diff(x, axis=1)
    chord = np.diff(y, axis=1) / width
    square = cube = np.zeros_like(chord)
    rise = chord
    if kind == "constant":
        y, rise = x * last, np.broadcast_to(last, chord.shape)
    elif kind == "akima" and x.shape[1] >= _ENOUGH:
        tangent = _tangents(chord)
        into, out = tangent[:, :-1], tangent[:, 1:]
        rise = into.copy()
        square = (3 * chord - 2 * into - out) / width
        cube = (into + out - 2 * chord) / width**2
        rise[:, 0], square[:, 0], cube[:, 0] = chord[:, 0], 0.0, 0.0  # below the smallest size
    nothing = np.zeros_like(last)
    ends = np.minimum(np.concatenate([x, np.full_like(last, most + 1)], axis=1), most + 1)
    lengths = np.diff(ends, axis=1).astype(np.int64).ravel()

    def spread(*columns: Floats) -> Floats:
        """The values of each piece, repeated for each of its units."""
        return np.repeat(np.concatenate(columns, axis=1).ravel(), lengths)

    off = np.tile(np.arange(most + 1.0), len(x)) - spread(x[:, :-1], nothing)
    times = spread(rise, last) * off + spread(y[:, :-1], nothing)
    if kind == "akima":
        times += (spread(cube, nothing) * off + spread(square, nothing)) * off * off
    return times.reshape(len(x), most + 1)


def _tangents(chord: Floats) -> Floats:
    """Tangents of Akima's spline at each point, from the slopes between them [devices, pieces]."""
    first, second = chord[:, :1], chord[:, 1:2]
    last, before = chord[:, -1:], chord[:, -2:-1]
    slope = np.concatenate(
        [
            3 * first - 2 * second,
            2 * first - second,
            chord,
            2 * last - before,
            3 * last - 2 * before,
        ],
        axis=1,
    )
    bend = np.abs(np.diff(slope, axis=1))
    left, right = bend[:, :-2], bend[:, 2:]
    both = left + right
    is_bent = both > _STRAIGHT * both.max(axis=1, keepdims=True)
    weighted = (right * slope[:, 1:-2] + left * slope[:, 2:-1]) / np.where(is_bent, both, 1.0)
    found: Floats = np.where(is_bent, weighted, (slope[:, :-3] + slope[:, 3:]) / 2)
    return found


KINDS: tuple[Kind, ...] = ("constant", "linear", "akima")


def seconds_of(models: Sequence[TimeModel], most: int) -> NDArray[np.float64]:
    """Seconds for 0, 1, ... `most` units, of many models at once [models, most + 1]."""
    points = [np.array([(own.units, own.seconds) for own in model.points]) for model in models]
    return tables([model.kind for model in models], points, most)
