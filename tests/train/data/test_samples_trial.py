"""Data sets and collate functions that one copy of could use, and many could not, are named."""

import itertools
import random
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from workbench.plan.experiment.task import TorchData
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data
from workbench.train.data.reading import DataError, Indexed, digest
from workbench.train.data.samples import try_samples

torch.manual_seed(0)
X, Y = torch.randn(24, 2), torch.arange(24) % 3
ROWS = TensorDataset(X, Y)


def opened(data):
    return open_data(data, (Input((2,)),), 3, "train")


def tried(train, **fields):
    try_samples(opened(TorchData(train=train, **fields)))


class Changing(TensorDataset):
    """Adds what `draw` gives to each sample."""

    def __init__(self, draw):
        super().__init__(X, Y)
        self.draw = draw

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + float(self.draw()), y


@pytest.mark.parametrize(
    "draw",
    [np.random.default_rng(0).random, random.Random(0).random, itertools.count().__next__],
)
def test_a_sample_that_differs_from_read_to_read(draw):
    with pytest.raises(DataError, match="sample 0 is another one when it is read again"):
        tried(Changing(draw))


class Counted(TensorDataset):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_a_counter_that_does_not_matter_yet():
    with pytest.raises(DataError, match=r"keeps state: .* changes it\.reads"):
        tried(Counted(X, Y))


class Cached(TensorDataset):
    """Draws once, and remembers it."""

    def __init__(self):
        super().__init__(X, Y)
        self.kept = {}

    def __getitem__(self, index):
        return self.kept.setdefault(index, (X[index] + torch.randn(2), Y[index]))


class Numbered(TensorDataset):
    """Numbers names in the order in which it meets them."""

    def __init__(self):
        super().__init__(X, Y)
        self.numbers = {}

    def __getitem__(self, index):
        return X[index], self.numbers.setdefault(index % 5, len(self.numbers))


@pytest.mark.parametrize("data", [Cached(), Numbered()])
def test_a_sample_that_depends_on_what_was_read_before(data):
    with pytest.raises(DataError, match="sample 0, after others, is another one"):
        tried(data)


class Kept(TensorDataset):
    """Makes each sample once, of its index."""

    def __init__(self):
        super().__init__(X, Y)
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


def test_a_sample_may_be_kept():
    tried(Kept())


class Stream(IterableDataset):
    def __init__(self, length=24, step=0.0):
        self.length, self.step, self.passes = length, step, 0

    def __iter__(self):
        self.passes += self.step
        return ((X[index % 24] + self.passes, Y[index % 24]) for index in range(self.length))


def test_a_stream_that_is_another_one_in_each_pass():
    with pytest.raises(DataError, match=r"sample 0 \(reading changes it\.passes\) is another one"):
        tried(Stream(step=1), samples=24)


@pytest.mark.parametrize(("length", "text"), [(30, "has more than the 24"), (20, "ended after 20")])
def test_a_stream_of_another_length(length, text):
    with pytest.raises(DataError, match=text):
        tried(Stream(length), samples=24)


def test_an_endless_stream_is_told_how_to_end():
    class Endless(Stream):
        def __iter__(self):
            return ((X[0], Y[0]) for _ in itertools.count())

    with pytest.raises(DataError, match=r"let its __iter__ end there, itertools\.islice"):
        tried(Endless(), samples=24)


def test_a_longer_stream_is_refused_where_an_epoch_ends():
    stream = opened(TorchData(train=Stream(30), samples=24))
    stream.batch(torch.arange(20))
    with pytest.raises(DataError, match="has more than the 24 samples"):
        stream.batch(torch.arange(20, 24))


def mixed(samples):
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def shuffled(samples):
    x, y = default_collate(samples)
    return x, y[torch.randperm(len(y))]


def normalised(samples):
    x, y = default_collate(samples)
    return (x - x.mean(0)) / x.std(0), y


def of_numpy(samples):
    x, y = default_collate(samples)
    return x + np.random.rand(), y


def filtered(samples):
    return default_collate([sample for sample in samples if sample[0][0] > -0.5])


def counting():
    calls = 0

    def collate(samples):
        nonlocal calls
        calls += 1
        return default_collate(samples)

    return collate


class Scaled:
    """By the largest that was met."""

    largest = 0.0

    def __call__(self, samples):
        x, y = default_collate(samples)
        self.largest = max(self.largest, x.abs().max().item())
        return x / self.largest, y


class NumberedLabels:
    def __init__(self):
        self.numbers = {}

    def __call__(self, samples):
        x, _ = default_collate(samples)
        each = [self.numbers.setdefault(label, len(self.numbers)) for label in x[:, 0].tolist()]
        return x, torch.tensor(each)


@pytest.mark.parametrize(
    ("collate", "text"),
    [
        (mixed, "mixes rows: inputs of 8 samples"),
        (normalised, "mixes rows: inputs of 8 samples"),
        (shuffled, r"draws random numbers \(torch\)"),
        (of_numpy, r"draws random numbers \(numpy\.random\)"),
        (counting(), "keeps state: a call changes 'calls' in the closure of collate"),
        (Scaled(), "mixes rows|keeps state: after others"),
        (NumberedLabels(), "mixes rows|keeps state: after others"),
        (filtered, r"gives \d rows for 8 samples.*Subset"),
    ],
)
def test_a_collate_function_that_ranks_cannot_share(collate, text):
    with pytest.raises(DataError, match=text):
        tried(ROWS, collate=collate)


class Words(TensorDataset):
    """Targets of a length of their own."""

    def __getitem__(self, index):
        return X[index], torch.ones(1 + index % 5)


def padded(samples):
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.nn.utils.rnn.pad_sequence(ys, batch_first=True)


def test_targets_may_be_padded_to_the_longest():
    tried(Words(X), collate=padded)


class Epochs(TensorDataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


def test_an_indexed_data_set_is_told_its_epoch():
    data = Indexed(Epochs(X), 0, "mine")
    assert data.__getitems__([(0, 1), (2, 1), (2, 3), (-1, 0)]) == [0, 2, 2, 0]


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(slots=True)
class Slotted:
    n: int


RING: list[Any] = []
RING.append(RING)
jagged = partial(torch.nested.nested_tensor, layout=torch.jagged)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (np.zeros(2), np.zeros(3)),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [2, 1]),
        (1, 1.0),
        ("a", b"a"),
        (Path("a"), Path("b")),
        ({1, 2}, {1, 3}),
        (Colour.RED, Colour.BLUE),
        (int, float),
        (Slotted(1), Slotted(2)),
        (RING, [RING, RING]),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (jagged([X[:1], X[:2]]), jagged([X[:2], X[:1]])),
        (torch.tensor([1j]).conj(), torch.tensor([1j])),
    ],
)
def test_samples_are_told_apart(one, other):
    assert digest(one) == digest(one) != digest(other)


def test_what_is_no_number_is_like_itself():
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
