"""A user's own data sets: samples that are read, and collated to batches that fit the model."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, default_collate

from workbench.plan.experiment.task import TorchData, is_iterated, made
from workbench.plan.extension.own import Own
from workbench.train.data.reading import EVALUATION, DataError, Indexed, Key, Streamed

Batch = tuple[Tensor, Any]
"""Inputs [rows, *input_shape] and targets."""


class OwnSamples:
    """One split of a user's own data.

    Args:
        value: the data sets.
        split: "train" or "test".
        shape: the shape of one of the model's samples.
        seed: the experiment's.
        vocabulary: the number of tokens, if the model reads token ids.

    Raises:
        DataError: there is no such split, or it has no samples.
        OwnObjectError: it cannot be loaded here.
    """

    num_classes = None

    def __init__(
        self,
        value: TorchData,
        split: Literal["train", "test"],
        shape: tuple[int, ...],
        seed: int,
        vocabulary: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        given = value.train if split == "train" else value.test
        if given is None:
            raise DataError(f"{value!r} has no {split} split")
        self.name, self.workers, self._shape = f"{split} data {given}", value.workers, shape
        self._samples = self._reading(value, given, split, seed)
        collate = default_collate if value.collate is None else value.collate.loaded
        self._collate = _Collated(collate, value.inputs, value.targets, self.name)
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
        return isinstance(self._samples, Streamed)

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Tensor, epoch: int = EVALUATION) -> Batch:
        """Inputs and targets of these rows.

        Raises:
            DataError: a sample cannot be read, or the batch does not fit the model.
        """
        keys = [(epoch, index) for index in indices.tolist()]
        if not keys:
            return self._without_rows()
        return self._fitting(self._collate(self._samples.__getitems__(keys)), len(keys))

    def ahead(self, requests: Callable[[], Iterator[list[Key]]]) -> Generator[Batch, None, None]:
        """The batches of these rows, one after another, read ahead by the workers.

        Args:
            requests: makes the samples of each batch, in their order.

        Raises:
            DataError: as `batch`; or a worker died.
        """
        loader: DataLoader[Any] = DataLoader(
            self._samples,
            batch_sampler=_Full(requests),
            num_workers=self.workers,
            collate_fn=self._collate,
        )
        loaded = iter(loader)
        try:
            for keys in requests():
                if not keys:
                    yield self._without_rows()
                    continue
                try:
                    batch = next(loaded)
                except (DataError, RuntimeError) as error:
                    error.__traceback__ = None  # whose frames keep the workers
                    # torch puts what a worker raised behind the worker's traceback.
                    raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
                yield self._fitting(batch, len(keys))
        finally:
            del loaded  # and the workers end, which the traceback of an error would keep

    def _without_rows(self) -> Batch:
        """A batch as others, of no rows: a rank may have none."""
        if self._empty is None:
            inputs, targets = self._fitting(
                self._collate(self._samples.__getitems__([(EVALUATION, 0)])), 1
            )
            self._empty = inputs[:0], tree_map(lambda each: each[:0], targets)
        return self._empty

    def _check_tokens(self, inputs: Tensor) -> None:
        whole = not (inputs.is_floating_point() or inputs.is_complex())
        if self._vocabulary is None:
            return
        if not whole:
            raise DataError(
                f"{self.name}: the inputs are {inputs.dtype}, and the model reads token ids, whole "
                "numbers"
            )
        if inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) < self._vocabulary:
            wrong = inputs.max() if inputs.max() >= self._vocabulary else inputs.min()
            raise DataError(
                f"{self.name}: token {int(wrong)} is not in the model's vocabulary, 0 to "
                f"{self._vocabulary - 1}; trace the model with vocabulary= of the tokenizer"
            )

    def _fitting(self, batch: Batch, rows: int) -> Batch:
        inputs, targets = batch
        if tuple(inputs.shape) != (rows, *self._shape):
            raise DataError(
                f"{self.name}: the inputs of {rows} samples have shape {tuple(inputs.shape)}, and "
                f"the model reads {(rows, *self._shape)}"
            )
        self._check_tokens(inputs)
        for target in tree_flatten(targets)[0]:
            if not isinstance(target, Tensor) or target.shape[:1] != (rows,):
                found = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
                raise DataError(
                    f"{self.name}: targets are tensors with a row for each sample, [{rows}, ...], "
                    f"got {found}; a collate function can make them"
                )
        return inputs, targets


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
    """Of requests, those of any samples: what a worker can read.

    Args:
        requests: makes them.
    """

    def __init__(self, requests: Callable[[], Iterator[list[Key]]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[list[Key]]:
        return (keys for keys in self._requests() if keys)


class _Collated:
    """Makes a pair of a list of samples.

    Args:
        collate: the user's own function, or torch's.
        inputs: the key of the inputs, where batches are mappings; None: they are pairs.
        targets: the same for the targets.
        name: what the data is called in errors.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        inputs: str | None,
        targets: str | None,
        name: str,
    ) -> None:
        self._collate, self._keys, self._name = collate, (inputs, targets), name

    def __call__(self, samples: list[Any]) -> Batch:
        try:
            batch = self._collate(samples)
        except Exception as error:
            raise DataError(
                f"{self._name}: {len(samples)} samples cannot be collated: "
                f"{type(error).__name__}: {error}"
            ) from error
        inputs, targets = self._pair(batch)
        if not isinstance(inputs, Tensor):
            raise DataError(
                f"{self._name}: the inputs of a batch are one tensor, got {type(inputs).__name__}; "
                "a transform or a collate function can make it"
            )
        return inputs, targets

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        first, second = self._keys
        if isinstance(batch, Mapping):
            if first not in batch or second not in batch:
                raise DataError(
                    f"{self._name}: batches are mappings with the keys {sorted(map(str, batch))}; "
                    f"inputs and targets must be two of them, got {first!r} and {second!r}"
                )
            return batch[first], batch[second]
        if first is not None or not isinstance(batch, Sequence) or len(batch) != 2:
            raise DataError(
                f"{self._name}: a batch is (inputs, targets), or a mapping whose keys are given by "
                f"inputs= and targets=, got {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
                + "; collate= can make it, say inputs, (targets, weights)"
            )
        return batch[0], batch[1]
