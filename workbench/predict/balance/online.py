"""Balancing during a run: every step's times are points of the time models.

    start       equal sizes, or given ones
    each time   measured (size, seconds) join the models; while the devices differ by more than a
                threshold for some steps in a row, sizes are chosen anew from all points so far
    the end     the rest is less than a unit, or not worth a change

Source: Lastovetsky and Reddy 2009, the distributed functional partitioning algorithm (DFPA);
waiting for several steps in a row, and the worth of a change, are ours.

Times are compared as logarithms: disturbances make a rank several times slower, and a step that
took ten times as long shall not outweigh nine others.

    how long a rank takes         the mean of its logarithms without the smallest and the largest
                                  fifth, and Student's interval of it, by itself or against others
    whether it takes longer than  the same of two ranks' differences, step by step, so that what
    another                       disturbs both says nothing; the near end of the interval counts

With few steps nothing is trimmed, and the interval is as wide as so few make it: a small or
scattered difference is significant after more steps, or never. A large one is significant at once,
judged by the scatter of the steps before, also before a device changed: it is taken between
successive steps, where a change counts once.

Sources: von Neumann 1941 for the scatter of what drifts; Tukey and McLaughlin 1963 for the trimmed
mean's interval; Yuen and Dixon 1973 for that of two samples; repetition until that is small,
FuPerMod.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from workbench.predict.balance.time_model import Partition, Point, TimeModel, partition

CONFIDENCE = 0.95  # of how long a rank takes, both ends
# For how much longer one rank takes than another, one-sided. There are tests at every step, and it
# is the slowest and the fastest rank that are compared. Simulated, three equal ranks whose steps
# scatter by 3 % are taken for unequal in 0.5 % of all runs of 100 steps, by 10 % in 15 %.
SURE = 0.999
PLAIN = 0.2  # so much more, of the slow one's time, is a large difference
KNOWN = 8  # steps of which their scatter is known
_TRIMMED = 0.2
_LEAST_S = 1e-9  # what takes less counts as this

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """The times of all ranks in the same steps.

    Attributes:
        steps: the seconds of each rank in each step, two steps or more [steps, ranks].
    """

    steps: Sequence[Sequence[float]]

    @property
    def seconds(self) -> tuple[float, ...]:
        """The typical seconds of a step on each rank [ranks]."""
        return tuple(np.exp(_mean(self._logs)).tolist())

    def spread(self, rank: int, others: Sequence[int]) -> float:
        """The half width of a rank's confidence interval, relative to its time.

        By itself or against the mean of others, whichever is narrower: a disturbance common to all
        changes no shares, and one rank's scatter does not affect another.

        Args:
            rank: the rank's number.
            others: the ranks that it is compared with.
        """
        own = self._logs[:, rank]
        quantile = (1 + CONFIDENCE) / 2
        half = _half(own, quantile)
        if others:
            half = min(half, _half(own - self._logs[:, list(others)].mean(axis=1), quantile))
        return math.expm1(half)

    def is_longer(self, slow: int, fast: int, threshold: float) -> bool:
        """Whether one rank takes significantly longer than another, by more than a threshold.

        Args:
            slow: the number of the slower rank.
            fast: the number of the faster rank.
            threshold: the tolerated difference, relative to the slower rank's time.
        """
        longer = self._logs[:, slow] - self._logs[:, fast]
        return bool(_mean(longer) - _half(longer, SURE) > -math.log1p(-threshold))

    def is_plainly_longer(self, slow: int, fast: int, before: Sequence[Sequence[float]]) -> bool:
        """Whether one rank takes longer than another by a large difference, beyond their scatter.

        Args:
            slow: the number of the slower rank.
            fast: the number of the faster rank.
            before: the steps so far, with any shares, these included [steps, ranks].
        """
        if len(before) < KNOWN:
            return False
        longer = self._logs[:, slow] - self._logs[:, fast]
        earlier = Evidence(before)._logs
        changes = np.abs(np.diff(earlier[:, slow] - earlier[:, fast]))
        scatter = float(np.median(changes)) / (math.sqrt(2) * float(ndtri(0.75)))
        half = float(ndtri(SURE)) * scatter / math.sqrt(len(longer))
        return bool(longer.mean() - half > -math.log1p(-PLAIN))

    @cached_property
    def _logs(self) -> Floats:
        return np.log(np.maximum(np.array(self.steps, dtype=np.float64), _LEAST_S))


def _mean(values: Floats) -> Floats:
    """The trimmed mean over the first dimension."""
    ordered, cut = _ordered(values)
    middle: Floats = ordered[cut : len(ordered) - cut].mean(axis=0)
    return middle


def _half(values: Floats, quantile: float) -> float:
    """The half width of the trimmed mean's confidence interval."""
    ordered, cut = _ordered(values)
    n = len(ordered)
    pushed = np.clip(ordered, ordered[cut], ordered[n - 1 - cut])
    error = pushed.std(ddof=1) / ((1 - 2 * cut / n) * np.sqrt(n))
    return float(stdtrit(n - 2 * cut - 1, quantile) * error)


def _ordered(values: Floats) -> tuple[Floats, int]:
    """(values ascending over the first dimension, how many are trimmed at each end)."""
    return np.sort(values, axis=0), int(_TRIMMED * len(values))


_WORTH = 0.25
"""The part of the tolerated imbalance by which a new division must end earlier."""


@dataclass(frozen=True)
class Balancer:
    """The time models of the devices, and how their work is divided; an immutable value.

    Attributes:
        sizes: the units of each device now [devices].
        models: the time model of each device; None: it was never measured [devices].
        threshold: the imbalance that is tolerated, relative to the slowest device.
        patience: the number of successive measurements that must exceed it.
        grain: the units that stay together.
        exceeded: the number of successive measurements that have exceeded the threshold.
    """

    sizes: tuple[int, ...]
    models: tuple[TimeModel | None, ...] = ()
    threshold: float = 0.05
    patience: int = 3
    grain: int = 1
    exceeded: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            object.__setattr__(self, "models", (None,) * len(self.sizes))

    def measured(self, seconds: Sequence[float]) -> "Balancer":
        """The balancer after a step, in which each device took so many seconds.

        Its sizes change once the devices have differed for long enough, and a new division promises
        an earlier end.
        """
        now = Partition(self.sizes, tuple(seconds))
        if now.imbalance <= self.threshold:
            return replace(self, exceeded=0)
        if self.exceeded + 1 < self.patience:
            return replace(self, exceeded=self.exceeded + 1)
        models = tuple(map(self._learnt, self.models, self.sizes, seconds))
        known = replace(self, models=models, exceeded=0)
        if any(model is None for model in models):
            return known
        every = [model for model in models if model is not None]
        better = partition(sum(self.sizes), every, grain=self.grain)
        worth = self.threshold * _WORTH
        return (
            replace(known, sizes=better.sizes) if better.end_s < now.end_s * (1 - worth) else known
        )

    def expected(self, device: int) -> float | None:
        """Seconds that a device takes for its units, as last known; None: it was never measured."""
        model, size = self.models[device], self.sizes[device]
        return None if model is None else float(model.seconds(size)[size])

    def _learnt(self, model: TimeModel | None, size: int, seconds: float) -> TimeModel | None:
        """The time model with one more point; a device without work gives none.

        Points that the new one contradicts are dropped: the device has changed its speed.
        """
        if size == 0:
            return model
        point = Point(size, seconds)
        if model is None:
            return TimeModel((point,))
        before = float(model.seconds(size)[size])
        if seconds > 0 and abs(before - seconds) / seconds > 2 * self.threshold:
            return TimeModel((point,))
        return model.with_points([point])
