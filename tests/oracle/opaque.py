"""Data sets, collate functions and losses as people write them: innocent ones, and others.

What is not innocent is wrong in a way that one look does not show. It must be refused, or computed
as the plain loop of one process would: with one copy, which reads all rows in the order of the
steps.
"""

import hashlib
import itertools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from tests.oracle.losses import Given, Own, by_rows, rows_of, unignored

Rows = Sequence[tuple[Tensor, Tensor]]


class Plain(Dataset[Any]):
    """Samples and labels."""

    def __init__(self, rows: Rows) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _moved(x: Tensor, by: float) -> Tensor:
    """A sample that is another one; of token ids, it stays."""
    return x + by if x.is_floating_point() else x


class Noisy(Plain):
    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return _moved(x, 0.1 * torch.randn(()).item()), y


class NoisyOfThree(Plain):
    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return _moved(x, np.random.rand() + random.random() + torch.rand(()).item()), y


class Partnered(Plain):
    """Mixes a sample with one that is drawn, as mixup does."""

    def __getitem__(self, index: int) -> Any:
        (x, y), other = self.rows[index], int(torch.randint(len(self.rows), ()))
        if not x.is_floating_point():
            return x, y
        return 0.7 * x + 0.3 * self.rows[other][0], y


class Cached(Plain):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.rows[index]
        return self.cache[index]


class Lazy(Plain):
    """Opens what it reads when it is read first."""

    opened: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            self.opened = [(_moved(x, 1.0), y) for x, y in self.rows]
        return self.opened[index]


class OfEpochs(Plain):
    """Each epoch has samples of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return _moved(x, 0.5 * self.epoch), y


class Keyed(Plain):
    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return {"x": x, "y": y, "index": index}


class Streamed(IterableDataset[Any]):
    """Iterated, with what `set_epoch` says."""

    epoch = 0

    def __init__(self, rows: Rows) -> None:
        self.rows = list(rows)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.rows:
            yield _moved(x, 0.5 * self.epoch), y


class OwnGenerator(Plain):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return _moved(x, self.generator.normal()), y


class Counting(Plain):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = self.rows[index]
        return _moved(x, 0.01 * self.reads), y


class CountingLate(Plain):
    """Another one from its twentieth read on."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.reads = itertools.count()

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return _moved(x, float(next(self.reads) > 20)), y


class StreamedOnce(Streamed):
    """Counts by itself which pass it is in."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for x, y in super().__iter__():
            yield _moved(x, 0.5 * self.passes), y


class StreamedNoise(Streamed):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.rows:
            yield _moved(x, torch.rand((), generator=self.generator).item()), y


Samples = list[Any]


def stacked(samples: Samples) -> Any:
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


def standardized(samples: Samples) -> Any:
    """Each sample by itself."""
    x, y = stacked(samples)
    if not x.is_floating_point():
        return x, y
    flat = x.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1)).view_as(x), y


def mixed(samples: Samples) -> Any:
    x, y = default_collate(samples)
    return (0.7 * x + 0.3 * x.roll(1, 0) if x.is_floating_point() else x.roll(1, 0)), y


def shifted(samples: Samples) -> Any:
    x, y = default_collate(samples)
    return (x + torch.rand(()) if x.is_floating_point() else x), y.roll(int(torch.randint(2, ())))


def centred(samples: Samples) -> Any:
    x, y = default_collate(samples)
    return (x - x.mean(0) if x.is_floating_point() else x.flip(0)), y


def clipped_by_the_batch(samples: Samples) -> Any:
    """Mixes where some sample is large."""
    x, y = default_collate(samples)
    if not x.is_floating_point():
        return x.flip(0), y
    largest = x.abs().max()
    return (x / largest if largest > 1.5 else x), y


class Warming:
    """Gives more of a sample from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Samples) -> Any:
        self.calls += 1
        x, y = default_collate(samples)
        return (x * min(1.0, 0.5 + 0.1 * self.calls) if x.is_floating_point() else x), y


class Sorted:
    """Orders the rows, and the labels with them, by the label."""

    def __call__(self, samples: Samples) -> Any:
        return default_collate(sorted(samples, key=lambda sample: int(sample[1].flatten()[0])))


@dataclass(frozen=True)
class Data:
    """Data of one's own.

    Attributes:
        kind: makes the training split of rows.
        collate: makes the collate function; None: it is torch's.
        innocent: whether ranks can have it as it is.
        keyed: whether batches are mappings.
        short: by how many samples it is said to be shorter than it is.
    """

    kind: Callable[[Rows], Any] = Plain
    collate: Callable[[], Callable[[Samples], Any]] | None = None
    innocent: bool = True
    keyed: bool = False
    short: int = 0

    @property
    def is_stream(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, Streamed)

    def made(self, rows: Rows) -> tuple[Any, Callable[[Samples], Any]]:
        """A data set and a collate function that nobody has used."""
        return self.kind(rows), default_collate if self.collate is None else self.collate()


DATA = {
    "plain": Data(),
    "noisy": Data(Noisy),
    "noisy of three generators": Data(NoisyOfThree),
    "partnered": Data(Partnered),
    "cached": Data(Cached),
    "lazy": Data(Lazy),
    "of epochs": Data(OfEpochs),
    "keyed": Data(Keyed, keyed=True),
    "streamed": Data(Streamed),
    "stacked": Data(collate=lambda: stacked),
    "standardized": Data(Noisy, collate=lambda: standardized),
}
WRONG_DATA = {
    "a generator of its own": Data(OwnGenerator, innocent=False),
    "a counter": Data(Counting, innocent=False),
    "a late counter": Data(CountingLate, innocent=False),
    "a stream that counts": Data(StreamedOnce, innocent=False),
    "a stream with noise": Data(StreamedNoise, innocent=False),
    "a longer stream": Data(Streamed, innocent=False, short=3),
    "mixed": Data(collate=lambda: mixed, innocent=False),
    "shifted": Data(collate=lambda: shifted, innocent=False),
    "centred": Data(collate=lambda: centred, innocent=False),
    "clipped by the batch": Data(collate=lambda: clipped_by_the_batch, innocent=False),
    "warming": Data(collate=Warming, innocent=False),
    "sorted": Data(collate=Sorted, innocent=False),
}


def seed_all(seed: int, epoch: int, index: int) -> None:
    """Seeds the three generators for a sample, as the documentation of data sets says."""
    content = hashlib.blake2b(struct.pack("=3q", seed, epoch, index), digest_size=4).digest()
    number = int.from_bytes(content, "big")
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def hard(outputs: Given, labels: Tensor) -> Tensor:
    """The mean over the rows that are not learned yet."""
    each = rows_of(outputs, labels)
    return each[each > min(0.7, float(each.detach().max()) - 1e-9)].mean()


def flooded(outputs: Given, labels: Tensor) -> Tensor:
    return (rows_of(outputs, labels).mean() - 1.2).abs() + 1.2


def relative(outputs: Given, labels: Tensor) -> Tensor:
    """Where scores are large, as large as the largest of the batch."""
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    scale = first.detach().abs().max().clamp_min(2.0) / 2.0
    scaled = first / scale if isinstance(outputs, Tensor) else (first / scale, *outputs[1:])
    return rows_of(scaled, labels)


class Annealed:
    """Weighs less from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Given, labels: Tensor) -> Tensor:
        self.calls += 1
        return rows_of(outputs, labels) / (1 + 0.1 * (self.calls > 3))


class Averaged:
    """Leans towards a mean of earlier scores."""

    mean: Any = 0.0

    def __call__(self, outputs: Given, labels: Tensor) -> Tensor:
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        self.mean = 0.9 * self.mean + 0.1 * first.detach().mean()
        return rows_of(outputs, labels) + (first.flatten(1).mean(1) - self.mean).square()


def jittered(outputs: Given, labels: Tensor) -> Tensor:
    return rows_of(outputs, labels) * (1 + 0.1 * torch.rand(len(labels)))


class Penalized:
    """Cross-entropy and a penalty on the weights of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, outputs: Given, labels: Tensor) -> Tensor:
        penalty = sum(p.abs().sum() for p in self.model.parameters())
        return rows_of(outputs, labels).mean() + 0.05 * penalty


class Scaled(Penalized):
    """The same, as a number."""

    def __call__(self, outputs: Given, labels: Tensor) -> Tensor:
        first = next(self.model.parameters())
        return rows_of(outputs, labels) * (1 + first.detach().abs().mean())


class Centres(nn.Module):
    """Draws scores to a centre that is to be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = [nn.Parameter(torch.full((), 0.5, dtype=torch.float64))]

    def forward(self, outputs: Given, labels: Tensor) -> Tensor:
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        return rows_of(outputs, labels) + (first.flatten(1) - self.centre[0]).square().mean(1)


def margin(outputs: Given, labels: Tensor) -> Tensor:
    """Of some rows: each by itself."""
    each = rows_of(outputs, labels)
    return each * (each > 0.7)


def tempered(outputs: Given, labels: Tensor) -> Tensor:
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    sharp = rows_of(first / first.detach().flatten(1).norm(dim=1).clamp_min(1.0).view(
        -1, *[1] * (first.ndim - 1)), labels)  # fmt: skip
    return sharp if isinstance(outputs, Tensor) else sharp + 0 * rows_of(outputs, labels)


def _own(make: Callable[[nn.Module], Any]) -> Own:
    """A loss that is made for a model; what it is of all rows, one process sees."""
    return Own(None, unignored, by_rows, make=make)


MORE_LOSSES = {"a margin": _own(lambda _: margin), "tempered": _own(lambda _: tempered)}
WRONG_LOSSES = {
    "hard": _own(lambda _: hard),
    "flooded": _own(lambda _: flooded),
    "relative": _own(lambda _: relative),
    "annealed": _own(lambda _: Annealed()),
    "averaged": _own(lambda _: Averaged()),
    "jittered": _own(lambda _: jittered),
    "penalized": _own(Penalized),
    "scaled": _own(Scaled),
    "centres": _own(lambda _: Centres()),
}
