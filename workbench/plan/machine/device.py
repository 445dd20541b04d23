"""A link between ranks: the time of collectives over it.

    seconds = rounds x latency + received / bandwidth + added x reduction

Source: the alpha-beta-gamma model of Pipe-SGD (arXiv:1811.03619, sec. 4), where alpha is the
latency, 1/beta the bandwidth and gamma the seconds for each byte that is added up.

Estimates of a layer's time from measured layer shapes.

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

A device: the time of a layer on it, from measurements of layer shapes.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from workbench.plan.io.units import bandwidth_of
from workbench.plan.io.value import MachineValue
from workbench.plan.machine.work import Needed, Work, Workspace

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_OF_TORCH = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float64": "fp64",
    "double": "fp64",
}


def as_precision(given: object) -> object:
    """The name of a precision in any case, and torch's types and their names, for the precision."""
    name = str(given).lower().removeprefix("torch.")
    return _OF_TORCH.get(name, name if isinstance(given, str) else given)


HALVES: tuple[Precision, ...] = ("bf16", "fp16")
"""Those that are computed by autocast: in 16 bits, with weights and sums of gradients in fp32."""

INTO_NEW = "all_reduce into new memory"
BY_BACKEND = "all_reduce by the backend"
EXCHANGE = "exchange"
"""One piece that is exchanged with another rank through torch's communicator, also where ranks
share memory."""


Bandwidth = Annotated[
    float,
    BeforeValidator(lambda given: bandwidth_of(given) if isinstance(given, str) else given),
    Field(gt=0),
]


class Curve(MachineValue):
    """The measured times of one collective."""

    op: str
    """The collective's name in the recorder: "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all". All-reduces are in place, by the algorithm that "auto" means for gradients; those
    of activations, whose sum needs new memory, are `INTO_NEW`, and torch's own `BY_BACKEND`. Other
    algorithms consist of `EXCHANGE`s; and parameter servers "broadcast"."""
    ranks: int = Field(ge=1)
    """The ranks that took part."""
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    """(bytes that a rank receives, the mean over ranks, seconds), in ascending order of bytes."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if any(left >= right for (left, _), (right, _) in pairwise(self.points)):
            raise ValueError(f"points must be in ascending order of bytes, got {self.points}")
        return self

    def seconds(self, received: float) -> float:
        """Seconds by linear interpolation; outside the points, on the line of the nearest two."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        place = bisect_right(points, (received, float("inf")))
        place = min(max(place, 1), len(points) - 1)
        (left, before), (right, behind) = points[place - 1], points[place]
        slope = (behind - before) / (right - left)
        floor = min(seconds for _, seconds in points) / 2
        return max(before + slope * (received - left), floor)


class Link(MachineValue):
    """The connection of a group of ranks."""

    name: str
    """What it is called, for people."""
    latency_s: float = Field(ge=0)
    """Seconds of latency of one exchange between two ranks (alpha)."""
    bandwidth: Bandwidth
    """Bytes per second that one rank receives (1 / beta); or text such as "10gbit"."""
    reduction_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds for each byte that a rank adds up (gamma)."""
    busy: float = Field(default=0.0, ge=0, le=1)
    """The share of a collective's time in which its device computes nothing else."""
    curves: tuple[Curve, ...] = ()
    """The measured collectives; the model above is used for those that were not measured."""
    source: str = ""
    """The origin of the figures."""

    def seconds(self, op: str, ranks: int, received: float, rounds: int, added: float) -> float:
        """Seconds of one collective on one rank.

        Args:
            op: the collective's name in the recorder, such as "all_gather".
            ranks: the number of ranks in the group.
            received: the bytes that the rank receives.
            rounds: the number of successive exchanges.
            added: the bytes that the rank adds to others.
        """
        curve = self._curve.get((op, ranks))
        if curve is not None:
            return curve.seconds(received)
        return self._modelled(received, rounds, added)

    def exchanges(self, ranks: int, received: float, rounds: int, added: float) -> float:
        """Seconds of an algorithm whose rounds go through torch's communicator; see `seconds`."""
        if not self.has_measured(EXCHANGE, ranks):
            return self._modelled(received, rounds, added)
        each = self.seconds(EXCHANGE, ranks, received / rounds, 1, 0)
        return rounds * each + added * self.reduction_s_per_byte

    def has_measured(self, op: str, ranks: int) -> bool:
        """Whether a collective was measured in groups of so many ranks."""
        return (op, ranks) in self._curve

    def _modelled(self, received: float, rounds: int, added: float) -> float:
        moving = received / self.bandwidth + added * self.reduction_s_per_byte
        return rounds * self.latency_s + moving

    @cached_property
    def _curve(self) -> Mapping[tuple[str, int], Curve]:
        return {(curve.op, curve.ranks): curve for curve in self.curves}


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
    """Estimates the time of layers from samples."""

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


_KEPT = 2**16  # estimates


class Device(MachineValue):
    """The device that one rank computes on."""

    name: str
    """What it is called, for people."""
    kind: Literal["cpu", "cuda"]
    """The kind of processor."""
    memory_bytes: int = Field(gt=0)
    """The bytes of its memory."""
    bandwidth: Bandwidth
    """Attained bytes per second of streaming memory access."""
    flops: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Attained floating-point operations per second of matrix products, by precision."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of overhead for one kernel launch."""
    update_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds to update each byte of parameters, by the optimizer's kind."""
    coding_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds to encode and decode each byte of a gradient, by the codec's name."""
    load_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds to load each byte of a step's images."""
    recomputed_s: float = Field(default=0.0, ge=0)
    """Seconds of overhead for each recomputed layer, which tracks what it saves."""
    step_s: float = Field(default=0.0, ge=0)
    """Seconds of the fixed cost of every step."""
    samples: tuple[Sample, ...] = ()
    """The times of layers that were measured on it."""
    workspaces: tuple[Workspace, ...] = ()
    """What kernels of layers take beside their tensors, as measured on it."""
    sharers: int = Field(default=1, ge=1)
    """The ranks that compute on it, where it is a GPU."""
    library_bytes: int = Field(default=0, ge=0)
    """The bytes that libraries keep there once they have computed, such as cuBLAS."""
    source: str = ""
    """The origin of the figures."""

    def seconds(self, work: Work) -> Estimate:
        """The time of a layer, from the samples where there are any of its kind.

        Estimates are cached.
        """
        known = self._known.get(work)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[work] = self._experience.estimate(work)
        return known

    def workspace(self, work: Work) -> Needed | None:
        """What a layer's kernels take beside their tensors; None: it was not measured."""
        known = self._workspaces.get((work.key, work.precision))
        return None if known is None else known.at(work.rows)

    @cached_property
    def _workspaces(self) -> dict[tuple[str, str], Workspace]:
        return {(one.key, one.precision): one for one in self.workspaces}

    @cached_property
    def _known(self) -> dict[Work, Estimate]:
        return {}

    @cached_property
    def _experience(self) -> Experience:
        return Experience(self.samples, Rates(self.flops, self.bandwidth, self.call_s))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth, len(self.samples)))

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        fields = type(self).model_fields
        kept = {name: value for name, value in state["__dict__"].items() if name in fields}
        return {**state, "__dict__": kept}
