"""A user's own data sets: samples that are read, collated to batches that fit the model, and tried.

Each rank has a copy of the data set and of the collate function and reads its own rows, in an order
that follows from the plan. So a sample must be the same whenever it is read, after whatever others,
and a batch must be made of its samples one by one.
"""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, default_collate

from workbench.model.record.python_state import Walk, moved
from workbench.plan.experiment.task import TorchData, is_iterated, made
from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Input
from workbench.train.data.collated import Batch, Collated
from workbench.train.data.copied import copied
from workbench.train.data.reading import (
    ANOTHER,
    EVALUATION,
    DataError,
    Indexed,
    Key,
    Streamed,
    digest,
)


class OwnSamples:
    """One split of a user's own data.

    Raises:
        DataError: there is no such split, or it has no samples.
        OwnObjectError: it cannot be loaded here.
    """

    num_classes = None

    def __init__(
        self,
        value: TorchData,
        split: Literal["train", "test"],
        inputs: Sequence[Input],
        seed: int,
    ) -> None:
        given = value.train if split == "train" else value.test
        if given is None:
            raise DataError(f"{value!r} has no {split} split")
        self.name, self.workers, self._inputs = f"{split} data {given}", value.workers, inputs
        self.samples = self._reading(value, given, split, seed)
        collate = default_collate if value.collate is None else value.collate.loaded
        self.collate = Collated(collate, value.inputs, value.targets, inputs, self.name)
        self._empty: Batch | None = None

    def _reading(
        self, value: TorchData, given: Own, split: Literal["train", "test"], seed: int
    ) -> Indexed | Streamed:
        data = _opened(given, split)
        if not is_iterated(data):
            return Indexed(data, seed, self.name)
        if value.samples is None:
            raise DataError(
                f"{self.name} has no [index], and how many samples it has is not known: give "
                "samples=(of train, of test)"
            )
        if value.workers:
            raise DataError(
                f"{self.name} has no [index]: it is iterated by each rank, with workers=0, got "
                f"{value.workers}"
            )
        return Streamed(data, value.samples[split == "test"], seed, self.name)

    @property
    def is_stream(self) -> bool:
        """Whether its samples come in an order of their own."""
        return isinstance(self.samples, Streamed)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def collates(self) -> bool:
        return self.collate.is_own

    def read(self, indices: Tensor, epoch: int = EVALUATION) -> list[Any]:
        """These samples, as the data set gives them.

        Raises:
            DataError: a sample cannot be read.
        """
        return self.samples.__getitems__([(epoch, index) for index in indices.tolist()])

    def fitting(self, samples: list[Any]) -> Batch:
        """Inputs and targets of samples that were read.

        Raises:
            DataError: the batch does not fit the model.
        """
        return self._fitting(self.collate(samples), len(samples))

    def batch(self, indices: Tensor, epoch: int = EVALUATION) -> Batch:
        """Inputs and targets of these rows.

        Raises:
            DataError: a sample cannot be read, or the batch does not fit the model.
        """
        if not len(indices):
            return self._without_rows()
        return self.fitting(self.read(indices, epoch))

    def ahead(self, requests: Callable[[], Iterator[list[Key]]]) -> Generator[Batch, None, None]:
        """The batches of these rows, one after another, read ahead by the workers.

        Raises:
            DataError: as `batch`; or a worker died.
        """
        loader: DataLoader[Any] = DataLoader(
            self.samples,
            batch_sampler=_Full(requests),
            num_workers=self.workers,
            collate_fn=self.collate,
        )
        try:
            loaded = _started(loader)
        except Exception as error:  # of many kinds
            raise DataError(
                f"{self.name}: its {self.workers} workers cannot be started: "
                f"{type(error).__name__}: {error}; with workers=0 the rank itself reads it"
            ) from error
        try:
            for keys in requests():
                if not keys:
                    yield self._without_rows()
                    continue
                try:
                    batch = next(loaded)
                except Exception as error:
                    # Frames in these, which keep the workers, and are kept by the errors in them.
                    error.__traceback__ = error.__cause__ = error.__context__ = None
                    raise self._unread(error) from None
                yield self._fitting(batch, len(keys))
        finally:
            del loaded  # and the workers end, which the traceback of an error would keep

    def _unread(self, error: Exception) -> DataError:
        """What a worker has raised, or what torch or the system says of one that died."""
        if isinstance(error, DataError):
            # torch puts what a worker raised behind the worker's traceback.
            return DataError(str(error).rpartition("DataError: ")[2].strip())
        return DataError(
            f"{self.name}: a worker that reads it ended: {type(error).__name__}: "
            f"{str(error).strip()}; was there too little memory? Fewer workers= take less, and "
            "with workers=0 the rank itself reads"
        )

    def _without_rows(self) -> Batch:
        """A batch as others, of no rows: a rank may have none."""
        if self._empty is None:
            inputs, targets = self.fitting(self.read(torch.tensor([0])))
            self._empty = tree_map(lambda each: each[:0], (inputs, targets))
        return self._empty

    def _fitting(self, batch: Batch, rows: int) -> Batch:
        inputs, targets = batch
        given = (inputs,) if isinstance(inputs, Tensor) else inputs
        for one, values in zip(self._inputs, given, strict=True):
            self._check_input(one, values, rows)
        for target in tree_flatten(targets)[0]:
            if not isinstance(target, Tensor) or target.shape[:1] != (rows,):
                found = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
                raise DataError(
                    f"{self.name}: targets are tensors with a row for each sample, [{rows}, ...], "
                    f"got {found}; a collate function can make them"
                )
        return inputs, targets

    def _check_input(self, one: Input, values: Tensor, rows: int) -> None:
        """Checks shape, kind and range of an input."""
        named = f"inputs {one.name!r}" if one.name else "inputs"
        if tuple(values.shape) != (rows, *one.shape):
            raise DataError(
                f"{self.name}: the {named} of {rows} samples have shape {tuple(values.shape)}, and "
                f"the model reads {(rows, *one.shape)}"
            )
        whole = not (values.is_floating_point() or values.is_complex())
        masks = values.dtype == torch.bool
        if one.vocabulary is not None and (masks or not whole):
            raise DataError(
                f"{self.name}: the {named} are {values.dtype}, and the model reads token ids, "
                "whole numbers"
            )
        if one.dtype == "bool" and not masks:
            raise DataError(
                f"{self.name}: the {named} are {values.dtype}, and the model reads a mask: "
                "torch.bool, as x != 0 gives"
            )
        if one.is_real and not values.is_floating_point():
            raise DataError(
                f"{self.name}: the {named} are {values.dtype}, and the model reads real numbers: "
                f"{_as_real(one, values.dtype)}"
            )
        if one.vocabulary is None or not values.numel():
            return
        least, most = int(values.min()), int(values.max())
        if not 0 <= least <= most < one.vocabulary:
            wrong = most if most >= one.vocabulary else least
            of = f" of {one.name!r}" if one.name else ""
            raise DataError(
                f"{self.name}: token {wrong}{of} is not in the model's vocabulary, 0 to "
                f"{one.vocabulary - 1}; trace the model with vocabulary= of the tokenizer"
            )


def _as_real(one: Input, dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "x.abs() gives some, torch.view_as_real(x) two for each"
    gives = "x.float() / 255" if dtype == torch.uint8 else "x.float()"
    where = "in a transform of the data set, or in a collate function"
    if dtype == torch.bool:
        traced = f"Input({one.shape}, 'bool')"
    else:
        traced = f"Input({one.shape}, vocabulary=...), if they are token ids"
    return f"{gives} gives them, {where}; or trace it with {traced}"


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's iterator, which has started the workers."""
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    loaded = iter(loader)
    if before is not None:
        # torch's own handler would raise a dead worker's error in whatever the rank computes then,
        # and not where it reads, which finds out too.
        signal.signal(signal.SIGCHLD, before)
    return loaded


def _opened(given: Own, split: Literal["train", "test"]) -> Any:
    data = made(given)
    if isinstance(data, tuple) and len(data) == 2:
        data = data[split == "test"]
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) and not is_iterated(data):
        raise DataError(
            f"{given} gives {type(data).__name__}, which has no len() and [index], and cannot be "
            "iterated more than once"
        )
    return data


class _Full:
    """Of requests, those of any samples: what a worker can read."""

    def __init__(self, requests: Callable[[], Iterator[list[Key]]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[list[Key]]:
        return (keys for keys in self._requests() if keys)


SAMPLES = 8
COUNT_WITHIN_S = 0.5
"""How long a stream is read to see whether it is as long as it was said to be."""
SHARED_BYTES = 2**16
"""From this size on, tensors of a data set are not copied to see what it remembers."""


def try_samples(data: OwnSamples) -> None:
    """Reads some samples again, and by a copy that has read no others; and collates them so.

    Raises:
        DataError: a sample is another one when it is read again, or changes what the data set
            remembers; the collate function mixes rows, draws at random or keeps state; or a stream
            has another length than it was said to have.
    """
    count = min(SAMPLES, len(data))
    spread = 1 if data.is_stream else len(data) / count
    indices = (torch.arange(count) * spread).long()
    fresh = copied(data, shared_bytes=SHARED_BYTES)
    collates = [copied(data.collate) for _ in range(2)]
    first = data.read(indices, 0)
    before = _state(data)
    again = data.read(indices, 0) if data.is_stream else data.read(indices.flip(0), 0)[::-1]
    changed = moved(before, _state(data))
    said = f" (reading changes {', '.join(changed)})" if changed else ""
    for index, one, two in zip(indices.tolist(), first, again, strict=True):
        if digest(one) != digest(two):
            raise DataError(f"{data.name}: sample {index}{said} {ANOTHER}")
    if changed:
        raise DataError(
            f"{data.name} keeps state: reading the same samples again changes "
            f"{', '.join(changed)}. Each rank, and each of its workers, has a copy of its own, "
            "which reads other samples: let a sample follow from its index, and from set_epoch"
        )
    later = data.read(indices, 1)
    first_read = fresh.read(indices, 1) if data.is_stream else fresh.read(indices.flip(0), 1)[::-1]
    for index, one, two in zip(indices.tolist(), later, first_read, strict=True):
        if digest(one) != digest(two):
            raise DataError(f"{data.name}: sample {index}, after others, {ANOTHER}")
    data.fitting(first)
    if data.collates:
        halves = first[: count // 2], first[count // 2 :]
        for alone, half in zip(collates, halves, strict=True):
            if half and digest(data.collate(half)) != digest(alone(half)):
                raise DataError(
                    f"{data.name}: the collate function keeps state: after others, samples are "
                    "another batch. Each rank has a copy of its own, which collates other rows"
                )
    if isinstance(data.samples, Streamed):
        _count(data.samples)


def _state(data: OwnSamples) -> dict[str, object]:
    return Walk().of(data.samples.data, "it")


def _count(stream: Streamed) -> None:
    """Reads a stream to its end, if that is soon."""
    end = time.monotonic() + COUNT_WITHIN_S
    for index in itertools.count(SAMPLES):
        if index >= len(stream) or time.monotonic() > end:
            return
        stream.__getitems__([(0, index)])
