"""Brings a rank its rows of every step, in an order that follows from the seed and the epoch."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from workbench.plan.experiment.experiment import Experiment
from workbench.train.data.collated import Batch
from workbench.train.data.datasets import Dataset, order_seed
from workbench.train.data.reading import Key
from workbench.train.data.samples import OwnSamples


def order(seed: int | None, epoch: int, length: int) -> Tensor:
    if seed is None:
        return torch.arange(length)
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(length))


def rows_of_step(length: int, batch_size: int, seed: int | None, step: int) -> Tensor:
    """Indices of the global batch of step `step` (from 0), the same on every rank.

    An epoch has ceil(length / batch_size) steps, of which the last may be short: each sample
    comes exactly once an epoch.
    """
    epoch, position = divmod(step, -(-length // batch_size))
    return order(seed, epoch, length)[position * batch_size : (position + 1) * batch_size]


def length_of_step(length: int, batch_size: int, step: int) -> int:
    position = step % -(-length // batch_size)
    return min(batch_size, length - position * batch_size)


def epoch_of(length: int, batch_size: int, step: int) -> int:
    """The epoch, from 0, that step `step` belongs to."""
    return step // -(-length // batch_size)


Batches = Sequence[tuple[int, ...]]
"""For each micro-batch, the rows of each rank."""


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows of one micro-batch.

    Attributes:
        rows: the rows of every rank.
        first_row: the index of rank 0's first row in the step's global batch.
        inputs: of each of the model's inputs [own rows, *its shape].
        targets: a tensor [own rows, ...], or a nesting of such.
    """

    rows: tuple[int, ...]
    first_row: int
    inputs: tuple[Tensor, ...]
    targets: Any


def first_rows(batches: Batches) -> list[int]:
    """For each micro-batch, the index of rank 0's first row in the step's global batch."""
    return [0, *accumulate(sum(rows) for rows in batches)][:-1]


class Feed:
    """Reads a rank's rows, ahead where the data has workers.

    Args:
        dtype: the type of inputs that are no integers.
        batches_of: the micro-batches of a batch of so many samples.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Dataset,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        batches_of: Callable[[int], Batches],
    ) -> None:
        self.data, self._experiment, self._rank = data, experiment, rank
        self._device, self._dtype, self._batches_of = device, dtype, batches_of
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # the epoch's, which steps share
        self._ahead: tuple[int, Generator[Batch, None, None]] | None = None  # of which step next

    def samples(self, step: int) -> int:
        return length_of_step(len(self.data), self._experiment.batch_size, step)

    def take(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step.

        Raises:
            DataError: a sample cannot be read, or a batch does not fit the model.
        """
        batches = self._batches_of(self.samples(step))
        brought = self._read_ahead(step) if _has_workers(self.data) else self._read(step)
        return tuple(
            MicroBatch(rows, first, *moved(batch, self._device, self._dtype))
            # What is read ahead comes last: nothing of it is taken for a step to come.
            for rows, first, batch in zip(batches, first_rows(batches), brought, strict=False)
        )

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def _read(self, step: int) -> Iterator[Batch]:
        epoch = epoch_of(len(self.data), self._experiment.batch_size, step)
        for indices in self._own(step):
            yield self.data.batch(indices, epoch)

    def _read_ahead(self, step: int) -> Iterator[Batch]:
        """What workers have read since the step before; another step makes them begin anew."""
        assert isinstance(self.data, OwnSamples)
        if self._ahead is None or self._ahead[0] != step:
            self.close()
            self._ahead = step, self.data.ahead(lambda: self._keys(step))
        brought = self._ahead[1]
        self._ahead = step + 1, brought
        return brought

    def _keys(self, first: int) -> Iterator[list[Key]]:
        """For each micro-batch from this step on, this rank's samples."""
        for step in range(first, self._experiment.steps):
            epoch = epoch_of(len(self.data), self._experiment.batch_size, step)
            for indices in self._own(step):
                yield [(epoch, index) for index in indices.tolist()]

    def _own(self, step: int) -> list[Tensor]:
        """For each micro-batch of a step, the indices of this rank's samples."""
        length, size = len(self.data), self._experiment.batch_size
        epoch = epoch_of(length, size, step)
        if self._order[0] != epoch:
            seed = order_seed(self.data, self._experiment.seed)
            self._order = epoch, order(seed, epoch, length)
        batches, begin = self._batches_of(self.samples(step)), step % -(-length // size) * size
        found = []
        for rows, first in zip(batches, first_rows(batches), strict=True):
            start = begin + first + sum(rows[: self._rank])
            found.append(self._order[1][start : start + rows[self._rank]])
        return found


def _has_workers(data: Dataset) -> bool:
    return isinstance(data, OwnSamples) and data.workers > 0


def moved(batch: Batch, device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Any]:
    """Inputs and targets on a device; inputs of floating point in this type, targets at least."""
    inputs, targets = batch
    there = tuple(
        each.to(device, dtype) if each.is_floating_point() else each.to(device)
        for each in listed(inputs)
    )
    return there, tree_map(lambda each: as_wide(each, dtype).to(device), targets)


def listed(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All inputs of a batch, also where there is one."""
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def as_wide(target: Tensor, dtype: torch.dtype) -> Tensor:
    """A target of floating point in this type, where that holds all its values exactly.

    Losses of torch give what is less exact where outputs and targets differ in type, or refuse.
    """
    wider = target.is_floating_point() and torch.promote_types(target.dtype, dtype) == dtype
    return target.to(dtype) if wider else target
