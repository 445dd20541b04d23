"""Seconds of many devices for every number of units, all devices at once.

A model is a row of pieces, each a cubic from one measured size to the next: lines and constant
speeds are cubics, too. The pieces of all devices lie one after the other in flat arrays, so that
what is evaluated costs the same whatever sizes each device was measured at.

Source: Akima 1970 (doi:10.1145/321607.321609) for the tangents of its spline.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["constant", "linear", "akima"]
Floats = NDArray[np.float64]

_ENOUGH = 3  # points, with that of no work, from which on Akima's spline is another than lines
_STRAIGHT = 1e-9  # of the largest bend of a curve: less is none


def tables(kinds: Sequence[Kind], points: Sequence[Floats], most: int) -> Floats:
    """Seconds [devices, most + 1] for 0, 1, ... `most` units; none is less than the one before.

    Args:
        kinds: of each device's model.
        points: of each device, [sizes, 2]: units, ascending from 1, and seconds.
        most: units.
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
    """Of devices with equally many points [devices, sizes], the first of which is (0, 0)."""
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
        """Of every piece as often as it has units."""
        return np.repeat(np.concatenate(columns, axis=1).ravel(), lengths)

    off = np.tile(np.arange(most + 1.0), len(x)) - spread(x[:, :-1], nothing)
    times = spread(rise, last) * off + spread(y[:, :-1], nothing)
    if kind == "akima":
        times += (spread(cube, nothing) * off + spread(square, nothing)) * off * off
    return times.reshape(len(x), most + 1)


def _tangents(chord: Floats) -> Floats:
    """Of Akima's spline at each point, from the slopes [devices, pieces] between the points."""
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
