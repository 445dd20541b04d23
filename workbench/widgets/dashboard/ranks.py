"""Figures of each rank: its memory now, by category, and its recent seconds and bytes."""

import math
from collections.abc import Mapping
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
        now_bytes: after the last step.
        peak_bytes: the highest of the whole run.
        weight_bytes: of the last step's peak, weights and the model's buffers.
        gradient_bytes: gradients and the buckets that they travel in.
        optimizer_bytes: the optimizer's state.
        activation_bytes: what only lived within the step.
        buffer_bytes: what collectives travel through.
        compute_s: of a step.
        communication_s: of a step, in collectives.
        wait_s: of a step, for slower ranks.
        received_bytes: of a step, from other ranks.
        received_per_s: over the whole of the step.
        on_gpu: 1 or 0.
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


class Ranks:
    """The last rows of each rank.

    Args:
        world_size: number of ranks.
        recent: steps over which is averaged.
    """

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
