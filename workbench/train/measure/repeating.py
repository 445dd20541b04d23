"""Repeating a measurement until it is sure, or time is up.

The estimate is the mean without the fastest and the slowest fifth, since a host that does something
else for a moment makes few repetitions much slower; its interval is Student's, with the variance
of the values as they would be with those fifths pushed in to the rest.

Source: repetition until the confidence interval is small, as in FuPerMod; the trimmed mean's
interval is Tukey and McLaughlin's (1963).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.plan.placement.placement import Shard

CONFIDENCE = 0.95
_TRIMMED = 0.2
_FEWEST = 2  # repetitions that are made however late it is


@dataclass(frozen=True)
class Until:
    """When to stop repeating.

    Attributes:
        relative: half width of the confidence interval, relative to the mean, that is enough.
    """

    relative: float = 0.04
    least: int = 5
    most: int = 100


def estimate(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(trimmed mean, half width of its 95 % confidence interval) over repetitions.

    Args:
        values: [repetitions, ...], at least two repetitions.
    """
    ordered, cut = _ordered(values)
    n = len(ordered)
    kept = ordered[cut : n - cut]
    pushed = np.clip(ordered, kept[0], kept[-1]) if len(kept) > 1 else ordered
    degrees = max(1, len(kept) - 1)
    error = pushed.std(axis=0, ddof=1) / ((1 - 2 * cut / n) * np.sqrt(n))
    return kept.mean(axis=0), stdtrit(degrees, (1 + CONFIDENCE) / 2) * error


def typical(values: Sequence[float]) -> float:
    ordered, cut = _ordered(np.asarray(values))
    return float(ordered[cut : len(ordered) - cut].mean())


def _ordered(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """(ascending, how many to leave out at each end)."""
    n = len(values)
    return np.sort(values, axis=0), max(int(_TRIMMED * n), int(n > 2))


class Repetition:
    def __init__(self, group: Group, until: Until, within_s: float) -> None:
        self._group, self._until = group, until
        self._end = time.perf_counter() + within_s
        self._each = Shard(0, (1,) * group.size)
        self._done = 0

    def goes_on(self, values: list[NDArray[np.float64]]) -> bool:
        """Whether to repeat once more.

        Args:
            values: the seconds so far of the things that are measured together. What takes less
                than a hundredth of all need not be known as well as the rest.
        """
        n = len(values)
        late = n >= _FEWEST and time.perf_counter() > self._end
        if n < self._until.least:
            return self._agreed(False, late)
        mean, half = estimate(np.stack(values))
        matters = mean > 0.01 * mean.sum()
        sure = bool(np.all(half[matters] <= self._until.relative * mean[matters]))
        return self._agreed(sure, late or n >= self._until.most)

    def _agreed(self, sure: bool, late: bool) -> bool:
        """Goes on unless every rank is sure, or any is late; a rank waits here for the others."""
        mine = torch.tensor([int(late) * 2 + int(sure)])
        every = all_gather(mine, self._each, self._group, layer="calibration")
        return not (bool((every >= 2).any()) or bool((every % 2 == 1).all()))


def slowest(seconds: float, whole: Group) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64)
    each = Shard(0, (1,) * whole.size)
    return float(all_gather(mine, each, whole, layer="calibration").max())


def together(whole: Group) -> None:
    """Returns when all ranks have come here."""
    slowest(0.0, whole)


def finish(device: torch.device) -> None:
    """Waits for what was asked of a GPU, but for no collective that goes on beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
