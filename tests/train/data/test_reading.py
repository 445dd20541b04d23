"""What is only iterated gives each rank its own rows, whoever else reads, and when it goes on."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.train.data.spirals import CLASSES
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.task import TorchData
from workbench.plan.graph.graph import Input
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import Feed
from workbench.train.data.reading import DataError

GRAPH = trace(torch.nn.Linear(2, CLASSES), input_shape=(2,))
LENGTH, BATCH = 22, 8


class Walk(IterableDataset):
    """Samples of which each draws from all three generators, and depends on those before."""

    def __init__(self, length=LENGTH):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        place = torch.zeros(2)
        for index in range(self.length):
            drawn = random.random() + np.random.rand() + torch.rand(())
            place = place + torch.stack([drawn, torch.tensor(100.0 * self.epoch)])
            yield place, index


def experiment(data=None, shares=(1,), **fields):
    data = TorchData(train=Walk(), samples=(LENGTH, 0)) if data is None else data
    plan = Plan.data_parallel(GRAPH, len(shares), shares)
    return Experiment(
        plan=plan, data=data, optimizer="sgd", batch_size=BATCH, **{"steps": 7} | fields
    )


def feed(run, rank=0):
    """Reads a rank's rows, in two micro-batches."""

    def batches(count):
        return [run.plan.rows_of(count - count // 2), run.plan.rows_of(count // 2)]

    data = open_data(run.data, (Input((2,)),), CLASSES, "train", run.seed)
    return Feed(run, data, rank, torch.device("cpu"), torch.float32, batches)


def steps_of(run, first=0):
    """The inputs of each step, of all ranks in order."""
    feeds = [feed(run, rank) for rank in range(run.plan.world_size)]
    found = []
    for step in range(first, run.steps):
        taken = [one.take(step) for one in feeds]
        found.append(torch.cat([parts[index].inputs[0] for index in range(2) for parts in taken]))
    return found


def test_all_ranks_read_one_stream():
    alone = steps_of(experiment())
    assert [len(inputs) for inputs in alone] == [8, 8, 6, 8, 8, 6, 8]
    for first in (0, 3):
        epoch = torch.cat(alone[first : first + 3])
        assert (epoch[1:, 0] > epoch[:-1, 0]).all()  # in its own order
        assert epoch[-1, 1] == 100.0 * LENGTH * (first // 3)  # of the epoch that was set
    assert not torch.equal(alone[0][:, 0], alone[3][:, 0])
    for shares in ((1, 1), (3, 0, 1)):
        several = steps_of(experiment(shares=shares))
        assert all(map(torch.equal, several, alone))
    other = steps_of(experiment(seed=1))
    assert not torch.equal(other[0], alone[0])


def test_a_resumed_run_goes_on_where_it_was():
    alone = steps_of(experiment())
    for first in (1, 4, 6):
        assert all(map(torch.equal, steps_of(experiment(), first), alone[first:]))
    back, again = feed(experiment()), []
    for step in (4, 2, 4):
        again.append(torch.cat([batch.inputs[0] for batch in back.take(step)]))
    assert all(map(torch.equal, again, [alone[4], alone[2], alone[4]]))


def test_a_stream_has_generators_of_its_own():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    reading, found = feed(experiment()), []
    for step in range(3):
        found.append(torch.cat([batch.inputs[0] for batch in reading.take(step)]))
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    torch.rand(3)  # whatever else draws in between
    assert all(map(torch.equal, found, steps_of(experiment())))


def made():
    """A factory, as "module:function" names it."""
    return Walk()


def column(self, name):
    """What `[name]` gives of some data sets that are only iterated."""
    raise KeyError(name)


@pytest.mark.parametrize("kind", [Walk, type("Plain", (), dict(vars(Walk)))])
def test_a_name_of_a_column_is_no_index(kind):
    indexed = type("Columns", (kind,), {"__getitem__": column})()
    data = TorchData(train=indexed, samples=(LENGTH, 0))
    assert steps_of(experiment(data))[6].equal(steps_of(experiment())[6])


def test_epochs_follow_from_the_length_that_is_given():
    assert experiment(steps=None, epochs=2).steps == 6
    with_length = Walk()
    type(with_length).__len__ = lambda self: self.length
    try:
        assert experiment(TorchData(train=with_length), steps=None, epochs=2).steps == 6
    finally:
        del type(with_length).__len__


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(train=iter(Walk())), "train: .*__iter__ is no data set.* can be iterated once"),
        (dict(train=Walk()), "neither .index. nor len.*samples=.train, test."),
        (dict(train=Walk(), samples=(LENGTH, 0), workers=2), "with workers=0, got 2"),
        (dict(train=Walk(), samples=(0, 0)), "has no samples"),
    ],
)
def test_what_cannot_be_read_is_refused(fields, text):
    with pytest.raises(ExperimentError, match=text):
        TorchData(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(samples=(LENGTH + 1, 0)), f"ended after {LENGTH} of the {LENGTH + 1} samples"),
        (dict(), "how many samples it has is not known"),
        (dict(samples=(LENGTH, 0), workers=1), "with workers=0, got 1"),
    ],
)
def test_what_is_found_when_it_is_opened(fields, text):
    run = experiment(TorchData(train=f"{__name__}:made", **fields))
    with pytest.raises(DataError, match=text):
        steps_of(run)
