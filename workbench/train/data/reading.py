"""How samples of a user's own data set are read: by their index, or as they come.

A sample is the same whoever reads it, and whenever. While one with an index is read, the generators
of torch, numpy and Python are seeded by the experiment's seed, the epoch and that index. What is
only iterated has generators of its own, seeded by the experiment's seed and the epoch: every rank
iterates all of it, and keeps its own rows.
"""

import hashlib
import random
import struct
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class DataError(ValueError):
    """Data that is not there or does not fit the model; the text says what to do."""


Key = tuple[int, int]
"""(epoch, index) of a sample."""

# Of an epoch that is none: the test split is read alike whenever it is evaluated.
EVALUATION = -1


class Indexed(Dataset[Any]):
    """Samples by (epoch, index), each read under a seed of its own.

    Args:
        data: the data set, with `[index]`.
        seed: the experiment's.
        name: what it is called in errors.
    """

    def __init__(self, data: Any, seed: int, name: str) -> None:
        self._data, self._seed, self._name = data, seed, name

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Samples, one after another; torch's workers ask so, too."""
        with _generators_kept():
            return [self._read(*key) for key in keys]

    def _read(self, epoch: int, index: int) -> Any:
        _seed(self._seed, epoch, index)
        try:
            return self._data[index]
        except Exception as error:
            raise _unreadable(self._name, index, error) from error


class Streamed(Dataset[Any]):
    """Samples by (epoch, index) of a data set that is only iterated, which is once an epoch.

    To read one that lies behind, the epoch begins anew; its `set_epoch`, if it has that, is called
    before.

    Args:
        data: the data set, which gives a new iterator each time that it is asked.
        length: how many samples an epoch has.
        seed: the experiment's.
        name: what it is called in errors.
    """

    def __init__(self, data: Any, length: int, seed: int, name: str) -> None:
        self._data, self._length, self._seed, self._name = data, length, seed, name
        self._coming: Iterator[Any] = iter(())
        self._epoch: int | None = None
        self._next = 0
        self._generators: _Generators | None = None

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Samples, one after another."""
        with _generators_kept():
            if self._generators is not None:
                self._generators.restore()
            try:
                return [self._read(*key) for key in keys]
            finally:
                self._generators = _Generators.now()

    def _read(self, epoch: int, index: int) -> Any:
        try:
            if epoch != self._epoch or index < self._next:
                self._begin(epoch)
            while self._next <= index:
                self._next += 1
                sample = next(self._coming)
            return sample
        except StopIteration:
            raise DataError(
                f"{self._name} ended after {self._next - 1} of the {self._length} samples that it "
                "was said to have"
            ) from None
        except Exception as error:
            raise _unreadable(self._name, index, error) from error

    def _begin(self, epoch: int) -> None:
        _seed(self._seed, epoch, -1)
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(max(0, epoch))
        self._coming, self._epoch, self._next = iter(self._data), epoch, 0


def _unreadable(name: str, index: int, error: Exception) -> DataError:
    # In the text, as what a worker raises arrives without its traceback.
    at = traceback.extract_tb(error.__traceback__)[-1]
    return DataError(
        f"{name}: sample {index} cannot be read: {type(error).__name__}: {error} "
        f"(in {at.name}, line {at.lineno} of {Path(at.filename).name})"
    )


def _seed(*words: int) -> None:
    """Seeds the three generators."""
    content = struct.pack("=3q", *words)
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=4).digest())
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class _Generators(NamedTuple):
    """The states of the three generators."""

    of_torch: Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> "_Generators":
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Gives the three generators back as they were."""
    before = _Generators.now()
    try:
        yield
    finally:
        before.restore()
