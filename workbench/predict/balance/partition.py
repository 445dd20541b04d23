"""Who gets how many of D units, so that the last device is done as early as can be.

All devices that are used end at the same time, were units real numbers: the sizes lie on one line
of constant time through their models, whose height is found by bisection. In whole units the
earliest end is one of the times in the models' tables, so that bisecting these is exact.

Source: Lastovetsky and Reddy 2007 (doi:10.1177/1094342006074864), the geometric algorithm; that
the end is exact in whole units, upper bounds and devices left out are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.predict.balance.time_model import TimeModel


@dataclass(frozen=True)
class Partition:
    """Units of each device.

    Attributes:
        sizes: units.
        seconds: that each device takes for them, as its model says.
        overhead_s: of communication among the devices that are used.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    overhead_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When all are done."""
        return max(self.seconds) + self.overhead_s

    @property
    def imbalance(self) -> float:
        """(slowest - fastest) / slowest, of the devices that are used; 0: all end at once."""
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
) -> Partition:
    """The sizes with the earliest end.

    Args:
        total: units to hand out.
        models: of each device.
        least: units of every device; 0: a device may be left out.
        most: units that each device's memory allows; None: any number.
        grain: units that are handed out together; one device gets a rest as well.
        overheads_s: seconds of communication where 1, 2, ... devices are used; devices that
            cost more than they help are left out. None: it is the same for any number.

    Raises:
        ValueError: no device, or bounds that leave no way to hand out `total` units.
    """
    limits = [total] * len(models) if most is None else [_limit(m, total) for m in most]
    _check(total, len(models), least, limits, grain)
    tables = [model.seconds(total) for model in models]
    if overheads_s is None or least > 0:
        chosen = _divided(total, tables, [least] * len(models), limits, grain)
        used = sum(size > 0 for size in chosen)
        return _found(chosen, tables, 0.0 if overheads_s is None else overheads_s[used - 1])
    order = sorted(range(len(models)), key=lambda i: (tables[i][min(limits[i], total)], i))
    found = []
    for count in range(1, len(models) + 1):
        allowed = set(order[:count])
        own = [limit if i in allowed else 0 for i, limit in enumerate(limits)]
        if sum(own) >= total:
            chosen = _divided(total, tables, [0] * len(models), own, grain)
            used = max(1, sum(size > 0 for size in chosen))
            found.append(_found(chosen, tables, overheads_s[used - 1]))
    return min(found, key=lambda partition: partition.end_s)


def _divided(
    total: int,
    tables: Sequence[NDArray[np.float64]],
    floors: Sequence[int],
    limits: Sequence[int],
    grain: int,
) -> tuple[int, ...]:
    """Sizes whose largest time is the least."""

    def held(end: float) -> list[int]:
        """What each device does until then: whole grains, and never less than it must."""
        sizes = []
        for table, floor, limit in zip(tables, floors, limits, strict=True):
            done = int(np.searchsorted(table[: limit + 1], end, side="right")) - 1
            sizes.append(max(floor, done // grain * grain))
        return sizes

    rest = total % grain
    ends = np.unique(np.concatenate(tables))
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(held(ends[middle])) >= total - rest:
            high = middle
        else:
            low = middle + 1
    sizes = held(ends[low])
    surplus = sum(sizes) - (total - rest)
    while surplus > 0:
        free = [i for i, size in enumerate(sizes) if size > floors[i]]
        last = max(free, key=lambda i: (tables[i][sizes[i]], i))
        given_back = min(grain, sizes[last] - floors[last], surplus)
        sizes[last] -= given_back
        surplus -= given_back
    while (missing := total - sum(sizes)) > 0:
        room = [i for i, size in enumerate(sizes) if size < limits[i]]
        first = min(room, key=lambda i: (tables[i][min(sizes[i] + missing, limits[i])], i))
        sizes[first] += min(missing, limits[first] - sizes[first])
    return tuple(sizes)


def _found(
    sizes: tuple[int, ...], tables: Sequence[NDArray[np.float64]], overhead_s: float
) -> Partition:
    seconds = tuple(float(table[size]) for table, size in zip(tables, sizes, strict=True))
    return Partition(sizes, seconds, overhead_s)


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
