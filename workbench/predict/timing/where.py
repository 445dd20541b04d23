"""Where each step strategy is the fastest."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.plan.sync import Sync
from workbench.predict.timing.model import TimingModel

_POINTS = 200
_SAME = 1e-9  # relative: closed forms that meet in max(...) meet exactly, but for rounding


@dataclass(frozen=True)
class Range:
    """Bandwidths, in bytes/s, between which one strategy is the fastest."""

    name: str
    low: float
    high: float


def fastest(model: TimingModel, systems: Mapping[str, Sync]) -> str:
    """The name of the fastest; of equally fast ones the first."""
    seconds = {name: model.step_s(sync) for name, sync in systems.items()}
    least = min(seconds.values())
    return next(name for name, value in seconds.items() if value <= least * (1 + _SAME))


def where_fastest(
    model: TimingModel, systems: Mapping[str, Sync], low: float, high: float
) -> tuple[Range, ...]:
    """Every range of the bandwidths from `low` to `high`, ascending, with its fastest strategy.

    Args:
        model: its own bandwidth is put aside.
        systems: strategies by name, the preferred ones first: they win where several are equally
            fast.
        low: in bytes/s, positive.
        high: in bytes/s.
    """
    points = np.geomspace(low, high, _POINTS)
    winners = [fastest(model.at(bandwidth=point), systems) for point in points]
    ranges, begin = [], low
    for (left, before), (right, behind) in pairwise(zip(points, winners, strict=True)):
        if before != behind:
            end = _boundary(model, systems, before, left, right)
            ranges.append(Range(before, begin, end))
            begin = end
    return (*ranges, Range(winners[-1], begin, high))


def _boundary(
    model: TimingModel, systems: Mapping[str, Sync], winner: str, left: float, right: float
) -> float:
    """Where `winner`, fastest at `left` and not at `right`, stops to be: by halving."""
    while right > left * (1 + _SAME):
        middle = (left * right) ** 0.5
        if fastest(model.at(bandwidth=middle), systems) == winner:
            left = middle
        else:
            right = middle
    return float(right)
