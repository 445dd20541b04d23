"""The rows of each pass, and how much of an activation each rank then holds: all ranks at once."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment import Experiment
from workbench.plan.layout import ROWS, Layout
from workbench.plan.placement import Shard
from workbench.plan.row_shares import shared_out

Counts = NDArray[np.int64]


class Rows:
    """The rows of one pass: a whole batch, a micro-batch or a round.

    Args:
        own: of each rank of the world.
    """

    def __init__(self, own: Sequence[int]) -> None:
        self.own: Counts = np.asarray(own, dtype=np.int64)
        self._hash: int | None = None
        self._over: dict[int, Counts] = {1: self.own}
        self._elements: dict[tuple[int, tuple[int, ...], int], tuple[Layout, Counts]] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.own)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Rows) and np.array_equal(self.own, other.own))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.own.tobytes())
        return self._hash

    def __repr__(self) -> str:
        return f"Rows({self.own.tolist()})"

    def over(self, group_size: int) -> Counts:
        """For each rank, the rows of its whole shard group."""
        if group_size not in self._over:
            groups = self.own.reshape(-1, group_size).sum(axis=1)
            self._over[group_size] = np.repeat(groups, group_size)
        return self._over[group_size]

    def elements(self, layout: Layout, shape: tuple[int, ...], per_sample: int) -> Counts:
        """Elements that each rank holds of an activation.

        Args:
            layout: where it lies.
            shape: of one sample.
            per_sample: rows of dimension 0 for each sample; 0: independent of the batch.
        """
        key = (id(layout), shape, per_sample)  # a layout is slow to hash
        found = self._elements.get(key)
        if found is None:  # it is kept with what was found, so that no other has its place
            found = self._elements[key] = layout, self._count(layout, shape, per_sample)
        return found[1]

    def _count(self, layout: Layout, shape: tuple[int, ...], per_sample: int) -> Counts:
        if per_sample == 0:
            return np.full(self.world_size, math.prod(shape), dtype=np.int64)
        rows = (self.own if layout == ROWS else self.over(layout.group_size)) * per_sample
        return rows * features(layout, shape, self.world_size)


def features(layout: Layout, shape: tuple[int, ...], world_size: int) -> Counts:
    """Elements of one sample that each rank holds."""
    cut = layout.placement
    if not isinstance(cut, Shard):
        return np.full(world_size, math.prod(shape), dtype=np.int64)
    others = math.prod(shape[: cut.dim - 1]) * math.prod(shape[cut.dim :])
    return tiled(cut.sizes, world_size) * others


def tiled(sizes: Sequence[int], world_size: int) -> Counts:
    """The sizes of one group's members, for every rank of the world."""
    return np.tile(np.asarray(sizes, dtype=np.int64), world_size // len(sizes))


def micro_batches(experiment: Experiment) -> list[tuple[int, ...]]:
    """For each micro-batch of a step, the rows of each rank."""
    counts = shared_out(experiment.batch_size, None, experiment.accumulate)
    return [experiment.plan.rows_of(count) for count in counts]
