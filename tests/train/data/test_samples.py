"""Samples by (epoch, index), of data sets that have an index and of those that are iterated."""

import random

import numpy as np
import pytest
import torch

from workbench.plan.experiment.experiment import Digits, Synthetic
from workbench.plan.experiment.task import TorchData
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data, order_seed
from workbench.train.data.reading import DataError, Indexed, Streamed


def drawn():
    return random.random(), np.random.rand(), torch.rand(()).item()


class Drawing:
    """Sample i is i and what was drawn for it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("three")
        return index, drawn()


def test_a_sample_follows_from_seed_epoch_and_index():
    data = Indexed(Drawing(), 5, "mine")
    assert len(data) == 4
    first, other, again = data.__getitems__([(0, 1), (0, 2), (0, 1)])
    assert (first[0], other[0]) == (1, 2)
    assert first == again
    assert first[1] != other[1]
    assert data.__getitems__([(1, 1)])[0][1] != first[1]
    assert Indexed(Drawing(), 6, "mine").__getitems__([(0, 1)])[0][1] != first[1]
    assert Indexed(Drawing(), 5, "mine").__getitems__([(0, 1)])[0] == first


def test_an_index_that_fails_is_named_with_its_line():
    with pytest.raises(DataError, match=r"mine: sample 3 cannot .* KeyError: 'three' .in __g"):
        Indexed(Drawing(), 5, "mine").__getitems__([(0, 0), (0, 3)])


def states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("indices", [[0, 1], [0, 3]])
def test_generators_are_given_back(indices):
    before = states()
    data = Indexed(Drawing(), 5, "mine")
    try:
        data.__getitems__([(0, index) for index in indices])
    except DataError:
        assert 3 in indices
    assert states() == before


class Counting:
    """An epoch's number and the index, of samples that are iterated; counts its beginnings."""

    def __init__(self, length=5):
        self.length, self.epoch, self.begun = length, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.begun += 1
        return ((self.epoch, index) for index in range(self.length))


def read(stream, *keys):
    return stream.__getitems__(list(keys))


def test_a_stream_begins_anew_for_what_lies_behind_and_for_another_epoch():
    data = Counting()
    stream = Streamed(data, 5, 0, "mine")
    assert read(stream, (0, 1), (0, 1)) == [(0, 1), (0, 1)]
    assert data.begun == 2
    assert read(stream, (1, 2)) == [(1, 2)]
    assert read(stream, (0, 3)) == [(0, 3)]
    assert data.begun == 4


def test_an_evaluation_is_of_the_first_epoch():
    assert read(Streamed(Counting(), 5, 0, "mine"), (-1, 0)) == [(0, 0)]


def test_a_stream_need_not_know_of_epochs():
    assert read(Streamed([7, 8, 9], 3, 0, "mine"), (2, 1)) == [8]


ROWS = [(torch.tensor([float(index)]), index) for index in range(4)]


def test_only_a_stream_has_an_order_of_its_own():
    stream = TorchData(train=Counting(), samples=(5, 0))
    assert order_seed(open_data(stream, (Input((1,)),), 2, "train"), 7) is None
    assert order_seed(open_data(TorchData(train=ROWS), (Input((1,)),), 2, "train"), 7) == 7
    assert order_seed(open_data(Digits(), (Input((1, 8, 8)),), 10, "test"), 7) == 7


def test_no_rows_are_a_batch_of_none():
    data = open_data(TorchData(train=ROWS), (Input((1,)),), 2, "train")
    inputs, targets = data.batch(torch.tensor([], dtype=torch.int64))
    assert (inputs.shape, targets.shape) == ((0, 1), (0,))
    inputs, targets = data.batch(torch.tensor([2, 0]))
    assert (inputs.tolist(), targets.tolist()) == ([[2.0], [0.0]], [2, 0])


@pytest.mark.parametrize(
    ("token", "fits"), [(-1, False), (0, True), (3, True), (4, False), (0.5, False)]
)
def test_tokens_are_those_of_the_vocabulary(token, fits):
    rows = [(torch.tensor([1, token]), 0)]
    data = open_data(TorchData(train=rows), (Input((2,), vocabulary=4),), 2, "train")
    if fits:
        assert data.batch(torch.tensor([0]))[0].tolist() == [[1, token]]
        return
    with pytest.raises(DataError, match="token ids" if token == 0.5 else f"token {token} is not"):
        data.batch(torch.tensor([0]))


@pytest.mark.parametrize(("split", "length"), [("train", 10), ("test", 2)])
def test_a_test_split_has_a_quarter_of_the_samples(split, length):
    data = Synthetic(samples=10, classes=3)
    assert len(open_data(data, (Input((2,)),), 3, split)) == length
    assert len(open_data(data, (Input((2,), vocabulary=7),), 3, split)) == length


def test_a_test_split_has_a_sample_at_least():
    data = Synthetic(samples=3, classes=3)
    assert len(open_data(data, (Input((2,)),), 3, "test")) == 1
    assert len(open_data(data, (Input((2,), vocabulary=7),), 3, "test")) == 1


@pytest.mark.parametrize("vocabulary", [None, 50])
def test_the_test_split_s_samples_lie_behind_the_others(vocabulary):
    """Sample 1 of the test split has the noise of sample 4 + 1 of a longer training split."""
    long, short = Synthetic(samples=12, classes=2), Synthetic(samples=4, classes=2)
    shape = (12,)
    whole = open_data(long, (Input(shape, vocabulary=vocabulary),), 2, "train")
    tests = open_data(short, (Input(shape, vocabulary=vocabulary),), 2, "test")
    again, labels = whole.batch(torch.tensor([4]))
    found, own = tests.batch(torch.tensor([0]))
    assert torch.equal(found, again)
    assert labels.tolist() == own.tolist() == [0]


def test_labels_go_round_the_classes():
    for vocabulary in (None, 50):
        data = open_data(
            Synthetic(samples=9, classes=3), (Input((12,), vocabulary=vocabulary),), 3, "train"
        )
        assert data.batch(torch.tensor([0, 4, 8]))[1].tolist() == [0, 1, 2]


def test_next_tokens_are_the_labels_of_tokens():
    data = Synthetic(samples=9, classes=3)
    shape = (12,)
    given = open_data(data, (Input(shape, vocabulary=50),), 50, "train", per_token=True)
    assert given.num_classes is None
    tokens, labels = given.batch(torch.tensor([0, 3]))
    assert tokens.shape == labels.shape == (2, 12)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert 0 < (tokens[0] == tokens[1]).sum() < 12  # of the same class, a quarter replaced


def test_classes_must_be_the_model_s():
    with pytest.raises(DataError, match="has 3 classes, the model 4; trace it with num_classes=3"):
        open_data(Synthetic(samples=9, classes=3), (Input((2,)),), 4, "train")
