"""The time that a device takes for d units of work: a functional performance model.

It is straight between measured sizes. Below the smallest one time falls to (0, 0) in a straight
line, and beyond the largest one the last speed holds. Time never falls as work grows: where
measurements do, the largest so far counts.

Source: Lastovetsky and Reddy 2007 (doi:10.1177/1094342006074864); FuPerMod (Clarke et al. 2013).

The pieces of all devices are concatenated in flat arrays, so that evaluation costs the same
whatever sizes each device was measured at.

If units were real numbers, all devices in use would end at the same time: the sizes lie on one line
of constant time through their models, whose height is found by bisection. In whole units the
earliest end is one of the times in the models' tables: bisection goes from one of them to another,
and ends at the exact one. Where only some devices may be used, those count that complete most until
then.

Source: Lastovetsky and Reddy 2007 (doi:10.1177/1094342006074864), the geometric algorithm;
exactness in whole units, upper bounds and devices left out are ours.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray


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

    Raises:
        ValueError: no points.
    """

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a time model needs at least one measured point")
        latest = {point.units: point for point in self.points}
        object.__setattr__(self, "points", tuple(sorted(latest.values())))

    def with_points(self, points: Iterable[Point]) -> "TimeModel":
        """The model with further points; the last measurement of a size counts."""
        return TimeModel((*self.points, *points))

    def seconds(self, most: int) -> NDArray[np.float64]:
        """Seconds for 0, 1, ... `most` units [most + 1], from 0 and never falling.

        Args:
            most: the largest number of units.
        """
        row: NDArray[np.float64] = seconds_of([self], most)[0]
        return row


Floats = NDArray[np.float64]


def tables(points: Sequence[Floats], most: int) -> Floats:
    """Seconds for 0, 1, ... `most` units, never falling [devices, most + 1].

    Args:
        points: the points of each device, units ascending from 1, and seconds [devices of [sizes,
            2]].
        most: the largest number of units.
    """
    found = np.empty((len(points), most + 1))
    alike: dict[int, list[int]] = {}
    for device, own in enumerate(points):
        alike.setdefault(len(own), []).append(device)
    for count, devices in alike.items():
        measured = np.zeros((len(devices), count + 1, 2))
        measured[:, 1:] = [points[device] for device in devices]
        found[devices] = _evaluated(measured[:, :, 0], measured[:, :, 1], most)
    return np.maximum.accumulate(found, axis=1)


def _evaluated(x: Floats, y: Floats, most: int) -> Floats:
    """Seconds of devices with equally many points [devices, sizes], the first being (0, 0)."""
    last = y[:, -1:] / x[:, -1:]
    rise = np.diff(y, axis=1) / np.diff(x, axis=1)
    ends = np.minimum(np.concatenate([x, np.full_like(last, most + 1)], axis=1), most + 1)
    lengths = np.diff(ends, axis=1).astype(np.int64).ravel()

    def spread(column: Floats, beyond: Floats) -> Floats:
        """The values of each piece, repeated for each of its units."""
        return np.repeat(np.concatenate([column, beyond], axis=1).ravel(), lengths)

    nothing = np.zeros_like(last)
    off = np.tile(np.arange(most + 1.0), len(x)) - spread(x[:, :-1], nothing)
    times = spread(rise, last) * off + spread(y[:, :-1], nothing)
    return times.reshape(len(x), most + 1)


def seconds_of(models: Sequence[TimeModel], most: int) -> NDArray[np.float64]:
    """Seconds for 0, 1, ... `most` units, of many models at once [models, most + 1]."""
    points = [np.array([(own.units, own.seconds) for own in model.points]) for model in models]
    return tables(points, most)


Units = NDArray[np.int64]
"""The units of each device [devices]."""


@dataclass(frozen=True)
class Partition:
    """The units of each device.

    Attributes:
        sizes: the units of each device [devices].
        seconds: the seconds that each device takes for its units, by its time model [devices].
        overhead_s: the seconds of communication among the devices that are used.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    overhead_s: float = 0.0

    @property
    def end_s(self) -> float:
        """The seconds until all devices are done, communication included."""
        return max(self.seconds) + self.overhead_s

    @property
    def imbalance(self) -> float:
        """(slowest - fastest) / slowest, over the devices that are used; 0: all end at once."""
        used = [s for size, s in zip(self.sizes, self.seconds, strict=True) if size]
        return (max(used) - min(used)) / max(used) if used and max(used) > 0 else 0.0


def partition(
    total: int,
    models: Sequence[TimeModel],
    *,
    least: int = 0,
    most: Sequence[int | None] | None = None,
    grain: int = 1,
    overheads_s: Sequence[float] | None = None,
    besides_s: Sequence[float] | None = None,
) -> Partition:
    """Divides units over devices, with the earliest end.

    Args:
        total: the units to divide.
        models: the time model of each device [devices].
        least: the least units of every device; 0: a device may be left out.
        most: the most units that each device's memory allows [devices]; None: any number.
        grain: the units that stay together; one device also gets the remainder.
        overheads_s: the seconds of communication where 1, 2, ... devices are used, not falling
            [devices]; devices that cost more than they help are left out. None: it is the same for
            any number.
        besides_s: the seconds of each device for work that does not depend on its size [devices].

    Raises:
        ValueError: no device, bounds that allow no division of `total` units, or overheads that
            fall.
    """
    limits = [total] * len(models) if most is None else [_limit(m, total) for m in most]
    _check(total, len(models), least, limits, grain)
    if overheads_s is not None and (
        len(overheads_s) != len(models) or list(overheads_s) != sorted(overheads_s)
    ):
        raise ValueError(
            f"overheads_s must be {len(models)} seconds that do not fall, for 1, 2, ... devices, "
            f"got {tuple(overheads_s)}"
        )
    tables = seconds_of(models, total)
    if besides_s is not None:
        tables += np.array(besides_s)[:, None]
    work = _Work(total, _from_nothing(tables), least, limits, grain)
    sizes = work.divided(len(models))
    assert sizes is not None, "all devices together have room"
    everybody = _found(sizes, tables)
    if overheads_s is None or least > 0:
        used = sum(size > 0 for size in everybody.sizes)
        cost = 0.0 if overheads_s is None else overheads_s[max(1, used) - 1]
        return replace(everybody, overhead_s=cost)
    best = replace(everybody, overhead_s=overheads_s[-1])
    for count in range(len(models) - 1, 0, -1):
        cost = overheads_s[count - 1]
        if not work.fits(count, best.end_s - cost):
            continue
        if (sizes := work.divided(count)) is not None:
            found = replace(_found(sizes, tables), overhead_s=cost)
            best = min(best, found, key=lambda partition: partition.end_s)
    used = max(1, sum(size > 0 for size in best.sizes))
    return replace(best, overhead_s=overheads_s[used - 1])


class _Work:
    """The work to divide, and how long each device takes for any part of it.

    Args:
        total: the units to divide.
        tables: the seconds of each device for each number of units, not falling [devices, total +
            1].
        least: the least units of every device.
        limits: the most units of each device [devices].
        grain: the units that stay together.
    """

    def __init__(
        self,
        total: int,
        tables: NDArray[np.float64],
        least: int,
        limits: Sequence[int],
        grain: int,
    ) -> None:
        self.total, self.tables, self.least, self.grain = total, tables, least, grain
        self.limits = np.array(limits)
        self.devices = np.arange(len(limits))

    def fits(self, count: int, end: float) -> bool:
        """Whether `count` devices can complete the work by `end`, but for less than a grain."""
        return end >= 0 and self._enough(count, self._done(end, 0 * self.limits, self.limits))

    def divided(self, count: int) -> tuple[int, ...] | None:
        """The sizes of at most `count` devices with the earliest end; None: no room."""
        if np.sort(self.limits)[-count:].sum() < self.total:
            return None
        fewest, most = 0 * self.limits, self.limits  # what each does until `low` and `high`
        low, high = 0.0, float(self._seconds(most).max())
        while low < high:
            middle = (low + high) / 2
            middle = low if middle >= high else middle
            done = self._done(middle, fewest, most)
            if self._enough(count, done):
                most, high = done, float(self._seconds(done).max())
            else:
                fewest, low = done, self._first_after(done)
        return self._exactly(self._held(most).tolist(), count)

    def _done(self, end: float, fewest: Units, most: Units) -> Units:
        """The most units that each device completes by `end`, between two bounds [devices]."""
        while (fewest < most).any():
            middle = (fewest + most + 1) // 2
            is_done = self._seconds(middle) <= end
            fewest = np.where(is_done, middle, fewest)
            most = np.where(is_done, most, middle - 1)
        return fewest

    def _held(self, done: Units) -> Units:
        """The units in whole grains, and never less than `least` [devices]."""
        held: Units = np.maximum(self.least, done // self.grain * self.grain)
        return held

    def _enough(self, count: int, done: Units) -> bool:
        most = np.sort(self._held(done))[-count:].sum()
        return bool(most >= self.total - self.total % self.grain)

    def _seconds(self, units: Units) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.tables[self.devices, units]
        return found

    def _first_after(self, done: Units) -> float:
        """The first time in a table at which some device completes more."""
        more = self._seconds(np.minimum(done + 1, self.limits))
        return float(more[done < self.limits].min())

    def _exactly(self, held: list[int], count: int) -> tuple[int, ...]:
        """The sizes of the `count` largest, less the surplus, plus a remainder below one grain."""
        used = sorted(range(len(held)), key=lambda i: -held[i])[:count]
        sizes = [size if i in used else 0 for i, size in enumerate(held)]
        surplus = sum(sizes) - (self.total - self.total % self.grain)
        latest = [(-self.tables[i, size], -i) for i, size in enumerate(sizes) if size > self.least]
        heapify(latest)
        while surplus > 0:
            i = -latest[0][1]
            given_back = min(self.grain, sizes[i] - self.least, surplus)
            sizes[i] -= given_back
            surplus -= given_back
            if sizes[i] > self.least:
                heapreplace(latest, (-self.tables[i, sizes[i]], -i))
            else:
                heappop(latest)
        while (missing := self.total - sum(sizes)) > 0:
            room = [i for i in used if sizes[i] < self.limits[i]]
            first = min(room, key=lambda i: (self._after(i, sizes[i] + missing), i))
            sizes[first] += min(missing, int(self.limits[first]) - sizes[first])
        return tuple(sizes)

    def _after(self, device: int, size: int) -> float:
        return float(self.tables[device, min(size, int(self.limits[device]))])


def _from_nothing(tables: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tables without fixed costs where a device gets nothing: no division changes those."""
    return np.concatenate([np.zeros((len(tables), 1)), tables[:, 1:]], axis=1)


def _found(sizes: tuple[int, ...], tables: NDArray[np.float64]) -> Partition:
    return Partition(sizes, tuple(tables[np.arange(len(sizes)), list(sizes)].tolist()))


def _limit(most: int | None, total: int) -> int:
    return total if most is None else min(most, total)


def _check(total: int, devices: int, least: int, limits: Sequence[int], grain: int) -> None:
    if devices == 0 or total < 0 or grain < 1:
        raise ValueError(f"{total} units in grains of {grain} for {devices} devices")
    if len(limits) != devices:
        raise ValueError(f"{len(limits)} upper bounds for {devices} devices")
    if sum(limits) < total:
        raise ValueError(
            f"{total} units do not fit: the devices' memory allows {sum(limits)} ({list(limits)})"
        )
    if least * devices > total or any(limit < least for limit in limits):
        raise ValueError(
            f"{devices} devices cannot have at least {least} of {total} units each, "
            f"with at most {list(limits)}"
        )
