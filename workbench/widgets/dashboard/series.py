"""What a dashboard shows of a run over its steps: curves of all ranks together, figures of each."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

NAN = math.nan


@dataclass(frozen=True)
class RankFigures:
    """One rank's memory now, and its averages over the recent steps.

    Bytes are the GPU's where the rank has one (then `on_gpu` is 1), and those of its tensors
    elsewhere. What is not known yet is NaN.

    Attributes:
        activation_bytes: bytes at that peak of what only lived within the step.
        buffer_bytes: bytes of what collectives travel through.
        received_per_s: the same by second, over the whole of the step.
    """

    now_bytes: float = NAN
    peak_bytes: float = NAN
    weight_bytes: float = NAN
    gradient_bytes: float = NAN
    optimizer_bytes: float = NAN
    activation_bytes: float = NAN
    buffer_bytes: float = NAN
    compute_s: float = NAN
    communication_s: float = NAN
    wait_s: float = NAN
    received_bytes: float = NAN
    received_per_s: float = NAN
    on_gpu: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.communication_s + self.wait_s


FIELDS = tuple(field.name for field in fields(RankFigures))
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")
"""Of memory, in the order of the fields and of the bars."""

_AVERAGED = ("compute_s", "communication_s", "wait_s", "received_bytes")


class RankSeries:
    """The last rows of each rank."""

    def __init__(self, world_size: int, *, recent: int = 20) -> None:
        self._recent = np.full((world_size, recent, len(_AVERAGED)), NAN)
        self._rows = [0] * world_size
        self._known = np.full((world_size, len(FIELDS)), NAN)
        self._known[:, -1] = 0.0

    def put(self, rank: int, row: Mapping[str, float]) -> None:
        """Takes a rank's next row."""
        recent = self._recent[rank]
        recent[self._rows[rank] % len(recent)] = [row.get(name, NAN) for name in _AVERAGED]
        self._rows[rank] += 1
        gpu = row.get("gpu_bytes", NAN)
        on_gpu = gpu > 0
        tensors, peak = row.get("tensor_bytes", NAN), row.get("peak_bytes", NAN)
        weights, optimizer = row.get("weight_bytes", NAN), row.get("optimizer_bytes", NAN)
        buffers = row.get("staging_bytes", NAN)
        own = self._known[rank]
        own[0] = gpu if on_gpu else tensors
        own[1] = np.fmax(own[1], peak)
        own[2:7] = (
            weights,
            tensors - weights - optimizer,
            optimizer,
            max(peak - tensors - buffers, 0.0),
            buffers,
        )
        own[-1] = float(on_gpu)

    @property
    def table(self) -> NDArray[np.float64]:
        """All figures, [ranks, fields]; the caller's own."""
        found = self._known.copy()
        known = np.isfinite(self._recent)
        count = known.sum(axis=1)
        sums = np.where(known, self._recent, 0.0).sum(axis=1)
        means = np.where(count > 0, sums / np.maximum(count, 1), NAN)
        found[:, 7:11] = means
        step_s = means[:, :3].sum(axis=1)
        found[:, 11] = np.where(step_s > 0, means[:, 3] / np.where(step_s > 0, step_s, 1), NAN)
        return found

    @property
    def figures(self) -> list[RankFigures]:
        """Of rank 0, 1, ..."""
        return [RankFigures(*row) for row in self.table.tolist()]


Row = Mapping[str, float]

COLUMNS = ("step", "loss", "samples_per_s", "accuracy")


class Series:
    """Rows of all ranks, joined by step, in at most `capacity` points.

    A point is (step, loss, samples_per_s, accuracy) of `stride` consecutive steps: means, and
    the last accuracy that was measured. When `capacity` points are full, neighbors are merged
    and `stride` doubles, so a run of any length keeps its shape.

    Args:
        capacity: the most points that are kept, an even number.
    """

    def __init__(self, world_size: int, *, capacity: int = 1024, recent: int = 20) -> None:
        self.world_size, self.capacity, self.recent = world_size, capacity, recent
        self.stride = 1
        self.done = 0  # steps that every rank has reported: one more than the last one's index
        self.accuracy = NAN
        self._first_time = NAN
        self._times: deque[tuple[int, float]] = deque(maxlen=recent + 1)
        self._settled: list[tuple[float, ...]] = []
        self._bucket: list[tuple[float, ...]] = []
        self._taken = 0
        self._partial: dict[int, dict[int, Row]] = {}
        self._ranks = RankSeries(world_size, recent=recent)

    def extend(self, rows: Iterable[Row]) -> None:
        """Takes in rows as they come: ranks in any order, each rank's steps ascending."""
        for row in rows:
            step, rank = int(row["step"]), int(row["rank"])
            if rank < self.world_size:  # an elastic job may have had more
                self._ranks.put(rank, row)
            if step < self.done:
                continue
            self._partial.setdefault(step, {})[rank] = row
            if len(self._partial[step]) == self.world_size:
                self._join(step)

    def spread_over(self, world_size: int) -> None:
        """Goes on with another number of ranks, as an elastic job does; points stay."""
        if world_size != self.world_size:
            self.world_size = world_size
            self._ranks = RankSeries(world_size, recent=self.recent)

    def settle(self) -> None:
        """Takes in the steps that some rank never reported; for a run that has ended."""
        if self._partial:
            self._join(max(self._partial))

    def measured(self, accuracy: float) -> None:
        """Records an accuracy that belongs to the last step, from outside of its rows.

        One that is not known, NaN, changes nothing.
        """
        if math.isnan(accuracy):
            return
        if self._bucket:
            self._bucket[-1] = (*self._bucket[-1][:-1], accuracy)
        elif self._settled:
            self._settled[-1] = (*self._settled[-1][:-1], accuracy)
            self._taken = min(self._taken, len(self._settled) - 1)
        self.accuracy = accuracy

    @property
    def points(self) -> list[tuple[float, ...]]:
        """All points, the last one perhaps of fewer than `stride` steps."""
        return [*self._settled, _merge(self._bucket)] if self._bucket else list(self._settled)

    @property
    def columns(self) -> dict[str, list[float]]:
        """The points by column."""
        points = self.points
        return {name: [point[i] for point in points] for i, name in enumerate(COLUMNS)}

    def take(self) -> tuple[int, list[tuple[float, ...]]]:
        """(start, points from there): what replaces `points[start:]` as taken last time."""
        start, self._taken = self._taken, len(self._settled)
        return start, self.points[start:]

    @property
    def ranks(self) -> list[RankFigures]:
        """The figures of rank 0, 1, ..."""
        return self._ranks.figures

    @property
    def figures(self) -> NDArray[np.float64]:
        """The same, [ranks, fields]."""
        return self._ranks.table

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first step's report to the last one's."""
        return self._times[-1][1] - self._first_time if self._times else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Over the recent steps; NaN before there are two."""
        if len(self._times) < 2:
            return NAN
        (first, start), (last, end) = self._times[0], self._times[-1]
        return (end - start) / (last - first)

    def _join(self, step: int) -> None:
        # A later step is complete, so what is still missing of an earlier one will not come.
        for earlier in sorted(known for known in self._partial if known <= step):
            self._append(earlier, list(self._partial.pop(earlier).values()))

    def _append(self, step: int, rows: Sequence[Row]) -> None:
        loss = _mean(row.get("loss", NAN) for row in rows)
        speed = _mean(row.get("samples_per_s", NAN) for row in rows)
        accuracy = _last(row.get("accuracy", NAN) for row in rows)
        time = _largest(row.get("time", NAN) for row in rows)
        self.done, self.accuracy = step + 1, _last((self.accuracy, accuracy))
        if math.isfinite(time):
            self._first_time = _last((time, self._first_time))
            self._times.append((step, time))
        self._bucket.append((float(step), loss, speed, accuracy))
        if len(self._bucket) < self.stride:
            return
        self._settled.append(_merge(self._bucket))
        self._bucket = []
        if len(self._settled) == self.capacity:
            pairs = zip(self._settled[::2], self._settled[1::2], strict=True)
            self._settled = [_merge(pair) for pair in pairs]
            self.stride, self._taken = 2 * self.stride, 0


def _merge(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    steps, losses, speeds, accuracies = zip(*points, strict=True)
    return steps[-1], _mean(losses), _mean(speeds), _last(accuracies)


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else NAN


def _last(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return known[-1] if known else NAN


def _largest(values: Iterable[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=NAN)
