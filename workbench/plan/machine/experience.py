"""Estimates of a layer's time from measured layer shapes.

    same key       on the line between the numbers of rows that were measured
    same kind      seconds = a + b flops + c bytes, fitted to the kind's samples, times what the
                   samples nearest to the work have over the fit
    nothing        roofline: the longer one of computing at the device's rate, and of moving
                   all bytes through its memory

For one key, seconds never fall with rows. Towards no rows they approach what does not depend on
them: the call's overhead, and reading the weights. Operations of a kind (ReLU, GELU) are separate
where both were measured.

Source: functional performance models (FuPerMod) for the first, the roofline model (Williams et
al. 2009) for the last.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from workbench.plan.machine.work import Work
from workbench.plan.value import MachineValue

Array = NDArray[np.float64]


class Sample(MachineValue):
    """The measured time of one layer shape at one number of rows."""

    kind: str
    """The kind of the layer, as in `Layer`."""
    key: str
    """The key of the layer shape, as in `Work`."""
    precision: str
    """The precision that it was computed in."""
    rows: int = Field(ge=0)
    """The rows of the batch."""
    flops: float = Field(ge=0)
    """The floating-point operations of the forward pass."""
    bytes: float = Field(ge=0)
    """The bytes that the forward pass reads and writes."""
    forward_s: float = Field(ge=0)
    """Seconds of the forward pass."""
    backward_s: float = Field(ge=0)
    """Seconds of the backward pass."""
    error: float = Field(default=0.0, ge=0)
    """Relative half width of the 95 % confidence interval of forward and backward together."""

    @classmethod
    def of(cls, work: Work, forward_s: float, backward_s: float, error: float = 0.0) -> Self:
        """The sample of a measurement of this work."""
        return cls(
            kind=work.kind,
            key=work.key,
            precision=work.precision,
            rows=work.rows,
            flops=work.flops,
            bytes=work.bytes,
            forward_s=forward_s,
            backward_s=backward_s,
            error=error,
        )


# Between measured rows, and for each doubling beyond them: relative errors of lines.
_BETWEEN, _BEYOND = 0.05, 0.08

# Without any sample of the kind.
ROOFLINE_ERROR = 1.0

# Layer shapes that differ by this factor in flops and in bytes still have some weight.
_NEAR = 2.0

_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a layer.

    Attributes:
        forward_s: the seconds of its forward pass.
        backward_s: the seconds of its backward pass.
        error: the relative half width of the error band around both, a 95 % interval.
        source: the origin: "measured" at these rows, "interpolated" from other numbers of rows of
            the same layer shape, or "estimated" from other shapes or from the device's figures.
    """

    forward_s: float
    backward_s: float
    error: float
    source: Literal["measured", "interpolated", "estimated"]


class Rates(NamedTuple):
    """The figures of a device that the roofline needs."""

    flops: Mapping[str, float]
    bandwidth: float
    call_s: float

    def seconds(self, work: Work) -> tuple[float, float]:
        """(forward, backward) seconds of a layer without samples."""
        rate = self.flops.get(work.precision) or max(self.flops.values())
        forward = self.call_s + max(work.flops / rate, work.bytes / self.bandwidth)
        return forward, forward * (2 if work.weight_bytes else 1)

    def least(self, work: Work) -> tuple[float, float]:
        """(forward, backward) seconds of a layer without rows."""
        weights = work.weight_bytes / self.bandwidth
        return self.call_s + weights, self.call_s + 2 * weights


class Experience:
    """Estimates the time of layers from samples.

    Args:
        samples: the samples of one device.
        rates: the figures of the device.
    """

    def __init__(self, samples: Sequence[Sample], rates: Rates) -> None:
        self._rates = rates
        self._lines: dict[tuple[str, str], list[Sample]] = {}
        for sample in sorted(samples, key=lambda sample: sample.rows):
            self._lines.setdefault((sample.precision, sample.key), []).append(sample)
        self._rising = {
            key: (rising([s.forward_s for s in line]), rising([s.backward_s for s in line]))
            for key, line in self._lines.items()
        }
        families: dict[tuple[str, str], list[Sample]] = {}
        for sample in samples:
            for family in dict.fromkeys((_operation(sample.key), sample.kind)):
                families.setdefault((sample.precision, family), []).append(sample)
        self._families = {key: _Family(found) for key, found in families.items() if found}

    def estimate(self, work: Work) -> Estimate:
        """The time of one layer's work."""
        if (work.precision, work.key) in self._lines:
            return self._on_line(work)
        for name in (_operation(work.key), work.kind):
            family = self._families.get((work.precision, name))
            if family is not None and (family.size >= _FEWEST or name == work.kind):
                return family.estimate(work)
        return Estimate(*self._rates.seconds(work), ROOFLINE_ERROR, "estimated")

    def _on_line(self, work: Work) -> Estimate:
        line = self._lines[work.precision, work.key]
        forwards, backwards = self._rising[work.precision, work.key]
        rows = [sample.rows for sample in line]
        place = bisect_left(rows, work.rows)
        if place < len(rows) and rows[place] == work.rows:
            sample = line[place]
            return Estimate(forwards[place], backwards[place], sample.error, "measured")
        least = self._rates.least(work)
        forward = _along(rows, forwards, work.rows, least[0])
        backward = _along(rows, backwards, work.rows, least[1])
        error = max(sample.error for sample in line) + _BETWEEN
        if place in (0, len(rows)):
            nearest = max(1, rows[0] if place == 0 else rows[-1])
            error += _BEYOND * abs(math.log2(max(1, work.rows) / nearest))
        return Estimate(forward, backward, error, "interpolated")


class _Family:
    """The samples of one kind, or of one operation of a kind, in one precision."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.size = len({sample.key for sample in samples})
        self._flops = np.array([sample.flops for sample in samples])
        self._bytes = np.array([sample.bytes for sample in samples])
        terms = np.stack([np.ones(len(samples)), self._flops, self._bytes], axis=1)
        sides = [[s.forward_s for s in samples], [s.backward_s for s in samples]]
        seconds = [np.maximum(np.array(side), 1e-9) for side in sides]
        self._costs = [costs(terms, side) for side in seconds]
        self._over = [
            np.log(side / (terms @ cost)) for side, cost in zip(seconds, self._costs, strict=True)
        ]
        took = seconds[0] + seconds[1]
        own = float(took @ [sample.error for sample in samples] / took.sum())
        self._error = own + self._left_out(seconds)

    def estimate(self, work: Work) -> Estimate:
        near = self._near(work.flops, work.bytes)
        forward, backward = (
            float(cost @ (1.0, work.flops, work.bytes)) * math.exp(_weighted(near, over))
            for cost, over in zip(self._costs, self._over, strict=True)
        )
        return Estimate(forward, backward, self._error, "estimated")

    def _near(self, flops: float, moved: float) -> Array:
        """The weight of each sample [samples]: 1 for equal work, e^-1/2 at a factor of `_NEAR`."""
        distance = np.log((self._flops + 1) / (flops + 1)) ** 2
        distance += np.log((self._bytes + 1) / (moved + 1)) ** 2
        weights: Array = np.exp(-distance / (2 * math.log(_NEAR) ** 2))
        return weights

    def _left_out(self, seconds: Sequence[Array]) -> float:
        """The relative error of estimating each sample from the others, a 95 % interval."""
        if self.size < _FEWEST:
            return ROOFLINE_ERROR / 2
        off = []
        for index in range(len(self._flops)):
            near = self._near(self._flops[index], self._bytes[index])
            near[index] = 0.0
            off += [float(over[index] - _weighted(near, over)) for over in self._over]
        return math.expm1(2 * math.sqrt(sum(x * x for x in off) / len(off)))


def _weighted(weights: Array, values: Array) -> float:
    """The weighted mean of values, with one more value of zero and weight 1."""
    return float(weights @ values / (weights.sum() + 1))


def _along(rows: Sequence[int], seconds: Sequence[float], at: int, least: float) -> float:
    """Seconds on the line through the two nearest points; never below `least` at no rows.

    With one point, or below the first, the line starts from `least` at no rows; and a line that
    would be lower there is lifted.
    """
    place = min(max(bisect_left(rows, at), 1), len(rows) - 1)
    if at < rows[0] or len(rows) == 1:
        start = min(least, seconds[0])
        if len(rows) > 1:
            slope = (seconds[1] - seconds[0]) / (rows[1] - rows[0])
            start = min(max(start, seconds[0] - slope * rows[0]), seconds[0])
        return start + (seconds[0] - start) * at / max(1, rows[0])
    left, right = place - 1, place
    slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
    return seconds[left] + slope * (at - rows[left])


def _operation(key: str) -> str:
    """The operation of a key: "elementwise ReLU" of "elementwise ReLU 64x32x32 > 64x32x32"."""
    return " ".join(key.split(" ", 2)[:2])


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values`, by least squares.

    Source: pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def costs(terms: Array, seconds: Array) -> Array:
    """The non-negative x with the least relative error in terms @ x = seconds.

    Args:
        terms: the terms of each sample, all >= 0 [samples, few].
        seconds: the seconds of each sample, all > 0 [samples].

    Each set of non-zero terms is tried, since there are few: exact, and without a tolerance.
    """
    count = terms.shape[1]
    scale = np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    relative = terms / scale / seconds[:, None]
    best, least = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = list(chosen)
            x, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(seconds)), rcond=None)
            if np.any(x < 0):
                continue
            off = float(np.sum((relative[:, columns] @ x - 1) ** 2))
            if off < least * (1 - 1e-9):
                best, least = np.zeros(count), off
                best[columns] = x
    found: Array = best / scale
    return found
