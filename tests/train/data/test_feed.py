"""Which rows a rank gets in which step, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.plan.experiment.task import TorchData
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import (
    Feed,
    as_wide,
    epoch_of,
    first_rows,
    length_of_step,
    moved,
    order,
    rows_of_step,
)

CPU = torch.device("cpu")


def test_without_a_seed_samples_come_as_they_lie():
    assert order(None, 3, 4).tolist() == [0, 1, 2, 3]


def test_the_order_follows_from_seed_and_epoch():
    expected = np.random.default_rng((7, 2)).permutation(9).tolist()
    assert order(7, 2, 9).tolist() == expected
    assert order(0, 1, 9).tolist() == np.random.default_rng((0, 1)).permutation(9).tolist()


@pytest.mark.parametrize(
    ("step", "rows", "epoch"),
    [
        (0, [0, 1, 2, 3], 0),
        (1, [4, 5, 6, 7], 0),
        (2, [8, 9], 0),
        (3, [0, 1, 2, 3], 1),
        (5, [8, 9], 1),
        (6, [0, 1, 2, 3], 2),
    ],
)
def test_an_epoch_s_last_batch_is_short(step, rows, epoch):
    assert rows_of_step(10, 4, None, step).tolist() == rows
    assert length_of_step(10, 4, step) == len(rows)
    assert epoch_of(10, 4, step) == epoch


@pytest.mark.parametrize("step", range(4))
def test_batches_that_fit_are_all_full(step):
    assert length_of_step(8, 4, step) == 4
    assert epoch_of(8, 4, step) == step // 2


def test_a_step_takes_its_rows_of_its_epoch_s_order():
    assert rows_of_step(10, 4, 5, 4).tolist() == order(5, 1, 10)[4:8].tolist()


def test_a_micro_batch_begins_behind_those_before_it():
    assert first_rows([(2, 1), (0, 4), (1, 1)]) == [0, 3, 7]
    assert first_rows([(2, 1)]) == [0]


def test_targets_take_the_type_where_it_holds_them():
    single, double = torch.ones(1), torch.ones(1, dtype=torch.float64)
    assert as_wide(single, torch.float64).dtype == torch.float64
    assert as_wide(double, torch.float32).dtype == torch.float64
    assert as_wide(single, torch.float32).dtype == torch.float32
    assert as_wide(torch.ones(1, dtype=torch.int64), torch.float64).dtype == torch.int64
    assert as_wide(torch.ones(1, dtype=torch.bfloat16), torch.float16).dtype == torch.bfloat16


def test_real_inputs_take_the_type_and_whole_ones_keep_theirs():
    targets = {"a": torch.ones(2), "b": (torch.ones(2, dtype=torch.int32),)}
    (inputs,), found = moved((torch.ones(2, 3), targets), CPU, torch.float64)
    assert inputs.dtype == found["a"].dtype == torch.float64
    assert found["b"][0].dtype == torch.int32
    several = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    (half, whole), _ = moved((several, ()), CPU, torch.float16)
    assert (half.dtype, whole.dtype) == (torch.float16, torch.int64)


class Numbers:
    """Sample i is i; remembers who asked for which, in which epoch."""

    num_classes = None

    def __init__(self, length):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def batch(self, indices, epoch=-1):
        self.asked.append((indices.tolist(), epoch))
        return indices.float(), indices


def feed(data, rank, *, batch_size=6, seed=0, steps=9):
    """Two micro-batches, of a third and two thirds, over the ranks (1, 0, the others)."""

    def batches_of(count):
        first = count // 3
        return [(1, 0, first - 1), (1, 0, count - first - 1)]

    run = SimpleNamespace(batch_size=batch_size, seed=seed, steps=steps)
    return Feed(run, data, rank, CPU, torch.float32, batches_of)


@pytest.mark.parametrize(
    ("rank", "places"), [(0, ([6], [8])), (1, ([], [])), (2, ([7], [9, 10, 11]))]
)
def test_a_rank_takes_its_own_rows_of_every_micro_batch(rank, places):
    """Of step 4, the second of the second epoch of 15 samples in batches of 6."""
    samples = order(0, 1, 15).tolist()
    data = Numbers(15)
    taken = feed(data, rank).take(4)
    expected = [[samples[place] for place in part] for part in places]
    assert data.asked == [(part, 1) for part in expected]
    assert [batch.targets.tolist() for batch in taken] == expected
    assert [batch.inputs[0].tolist() for batch in taken] == expected
    assert [batch.rows for batch in taken] == [(1, 0, 1), (1, 0, 3)]
    assert [batch.first_row for batch in taken] == [0, 2]


def test_a_rank_s_rows_lie_behind_those_of_all_before_it():
    run = SimpleNamespace(batch_size=6, seed=None, steps=1)
    taken = []
    for rank in range(4):
        given = (run, Numbers(6), rank, CPU, torch.float32, lambda _count: [(1, 2, 0, 3)])
        taken += [batch.targets.tolist() for batch in Feed(*given).take(0)]
    assert taken == [[0], [1, 2], [], [3, 4, 5]]


def test_a_short_batch_is_parted_as_it_is():
    samples = order(0, 0, 15).tolist()
    reader = feed(Numbers(15), 2)
    assert [reader.samples(step) for step in range(4)] == [6, 6, 3, 6]
    assert [batch.targets.tolist() for batch in reader.take(2)] == [[], [samples[14]]]


def test_any_step_may_be_taken_after_any_other():
    data = Numbers(15)
    reader = feed(data, 2)
    for step in (0, 4, 1, 3):
        reader.take(step)
    again = Numbers(15)
    for step in (0, 4, 1, 3):
        feed(again, 2).take(step)
    assert data.asked == again.asked


def test_the_experiment_s_seed_orders_samples():
    data = Numbers(15)
    feed(data, 0, seed=3).take(0)
    samples = order(3, 0, 15).tolist()
    assert data.asked == [([samples[0]], 0), ([samples[2]], 0)]


class Loading:
    """Stands for the workers of a data set; counts how often they begin and end."""

    def __init__(self):
        self.begun = self.ended = 0

    def __call__(self, requests):
        self.begun += 1
        try:
            for keys in requests():
                yield torch.tensor([float(index) for _, index in keys]), torch.tensor(keys)
        finally:
            self.ended += 1


@pytest.fixture
def reading(monkeypatch):
    """A feed with workers, a rank's two micro-batches of one row each, and what stands for them."""
    value = TorchData(train=[(torch.zeros(1), index) for index in range(5)], workers=1)
    data = open_data(value, (Input((1,)),), 2, "train")
    loading = Loading()
    monkeypatch.setattr(data, "ahead", loading)
    run = SimpleNamespace(batch_size=2, seed=0, steps=6)

    def batches_of(count):
        return [(1,), (count - 1,)]

    return Feed(run, data, 0, CPU, torch.float32, batches_of), loading


def targets(batches):
    return [batch.targets.tolist() for batch in batches]


def test_workers_read_on_from_step_to_step(reading):
    reader, loading = reading
    samples = order(0, 0, 5).tolist()
    assert targets(reader.take(0)) == [[[0, samples[0]]], [[0, samples[1]]]]
    assert targets(reader.take(1)) == [[[0, samples[2]]], [[0, samples[3]]]]
    assert targets(reader.take(2)) == [[[0, samples[4]]], []]
    assert targets(reader.take(3))[0] == [[1, order(0, 1, 5).tolist()[0]]]
    assert (loading.begun, loading.ended) == (1, 0)


def test_another_step_makes_workers_begin_anew(reading):
    reader, loading = reading
    reader.take(0)
    later = reader.take(4)
    assert (loading.begun, loading.ended) == (2, 1)
    assert targets(later)[0] == [[1, order(0, 1, 5).tolist()[2]]]
    reader.take(4)
    assert (loading.begun, loading.ended) == (3, 2)


def test_closing_ends_the_workers_once(reading):
    reader, loading = reading
    reader.close()
    reader.take(0)
    reader.close()
    reader.close()
    assert (loading.begun, loading.ended) == (1, 1)
    reader.take(1)
    assert loading.begun == 2


def test_the_last_step_is_the_last_that_is_read(reading):
    reader, _ = reading
    assert targets(reader.take(5)) == [[[1, order(0, 1, 5).tolist()[4]]], []]
    assert reader.take(6) == ()
