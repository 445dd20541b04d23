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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from workbench.plan.extension.user_object import is_looked_at


class DataError(ValueError):
    """Data that is not there or does not fit the model; the text says what to do."""


Key = tuple[int, int]
"""(epoch, index) of a sample."""

ANOTHER = (
    "is another one when it is read again. Each rank, and each of its workers, has a copy of the "
    "data set, so a sample must follow from its index: a generator or a counter of the data set's "
    "own is none that they share. Draw with torch, numpy.random or random: while a sample is read, "
    "they are seeded by the experiment's seed, the epoch and its index; and let set_epoch(epoch) "
    "say which epoch it is"
)

# Of an epoch that is none: the test split is read alike whenever it is evaluated.
EVALUATION = -1


class Indexed(Dataset[Any]):
    """Samples by (epoch, index), each read under a seed of its own.

    Its `set_epoch`, if it has that, is called where the epoch is another one. Some samples are read
    a second time, later, and must be the same.
    """

    def __init__(self, data: Any, seed: int, name: str) -> None:
        self.data, self._seed, self._name = data, seed, name
        self._epoch: int | None = None
        self._calls = 0
        self._earlier: tuple[Key, bytes] | None = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Samples, one after another; torch's workers ask so, too.

        Raises:
            DataError: a sample cannot be read, or one is another than it was before.
        """
        with _generators_kept():
            self._calls += 1
            looked_at = bool(keys) and is_looked_at(self._calls)
            if looked_at and self._earlier is not None:
                (epoch, index), before = self._earlier
                if digest(self._read(epoch, index)) != before:
                    raise DataError(f"{self._name}: sample {index} {ANOTHER}")
            found = [self._read(*key) for key in keys]
            if looked_at:
                self._earlier = keys[0], digest(found[0])
            return found

    def _read(self, epoch: int, index: int) -> Any:
        _seed(self._seed, epoch, index)
        try:
            if epoch != self._epoch:
                self._epoch = epoch
                if hasattr(self.data, "set_epoch"):
                    self.data.set_epoch(max(0, epoch))
            return self.data[index]
        except Exception as error:
            raise _unreadable(self._name, index, error) from error


class Streamed(Dataset[Any]):
    """Samples by (epoch, index) of a data set that is only iterated, which is once an epoch.

    To read one that lies behind, the epoch begins anew; its `set_epoch`, if it has that, is called
    before.
    """

    def __init__(self, data: Any, length: int, seed: int, name: str) -> None:
        self.data, self._length, self._seed, self._name = data, length, seed, name
        self._coming: Iterator[Any] = iter(())
        self._epoch: int | None = None
        self._next = 0
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with _generators_kept():
            if self._generators is not None:
                self._generators.restore()
            try:
                return [self._read(*key) for key in keys]
            finally:
                self._generators = Generators.now()

    def _read(self, epoch: int, index: int) -> Any:
        try:
            if epoch != self._epoch or index < self._next:
                self._begin(epoch)
            while self._next <= index:
                self._next += 1
                sample = next(self._coming)
            if self._next == self._length:
                self._refuse_more()
            return sample
        except StopIteration:
            raise DataError(
                f"{self._name} ended after {self._next - 1} of the {self._length} samples that it "
                "was said to have"
            ) from None
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(self._name, index, error) from error

    def _refuse_more(self) -> None:
        for _ in self._coming:
            raise DataError(
                f"{self._name} has more than the {self._length} samples that it was said to have, "
                "and the others would never be read: give samples= of all, or let its __iter__ end "
                "there, itertools.islice(..., n)"
            )

    def _begin(self, epoch: int) -> None:
        _seed(self._seed, epoch, -1)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(max(0, epoch))
        self._coming, self._epoch, self._next = iter(self.data), epoch, 0


def digest(sample: Any) -> bytes:
    """Tells a sample from others, by the values of all that is in it, as far as they are known."""
    found = hashlib.blake2b(digest_size=16)
    seen: dict[int, tuple[int, Any]] = {}  # objects, kept so that no other gets their id

    def add(value: Any) -> None:
        found.update(type(value).__name__.encode())
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
            value = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
            found.update(f"{tuple(value.shape)} {value.dtype}".encode())
            found.update(value.view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            found.update(f"{value.shape} {value.dtype}".encode())
            found.update(value.tobytes() if value.dtype != object else repr(value).encode())
        elif isinstance(value, _BY_TEXT):
            found.update(repr(value).encode())
        elif hasattr(type(value), "tobytes"):  # a picture
            found.update(value.tobytes())
        elif id(value) in seen:  # it may hold itself
            found.update(str(seen[id(value)][0]).encode())
        else:
            seen[id(value)] = len(seen), value
            for each in _parts(value):
                add(each)

    add(sample)
    return found.digest()


_NUMBER = int | float | complex | np.generic
_BY_TEXT = _NUMBER | str | bytes | bytearray | PurePath | Enum | type | None


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [each for item in value.items() for each in item]
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, Tensor):
        return value.unbind() if value.is_nested else [repr(value)]
    return value if isinstance(value, list | tuple) else [object.__getstate__(value)]


def _unreadable(name: str, index: int, error: Exception) -> DataError:
    # In the text, as what a worker raises arrives without its traceback.
    at = traceback.extract_tb(error.__traceback__)[-1]
    return DataError(
        f"{name}: sample {index} cannot be read: {type(error).__name__}: {error} "
        f"(in {at.name}, line {at.lineno} of {Path(at.filename).name})"
    )


def _seed(*words: int) -> None:
    content = struct.pack("=3q", *words)
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=4).digest())
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Generators(NamedTuple):
    of_torch: Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> "Generators":
        """Returns the states that they have."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    def moved(self) -> list[str]:
        """Returns the names of those that have another state now."""
        now = Generators.now()
        moved = {
            "torch": not torch.equal(self.of_torch, now.of_torch),
            "numpy.random": not all(map(np.array_equal, self.of_numpy, now.of_numpy)),
            "random": self.of_python != now.of_python,
        }
        return [name for name, is_moved in moved.items() if is_moved]


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = Generators.now()
    try:
        yield
    finally:
        before.restore()
