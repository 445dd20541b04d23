"""What a user brings is tried again while it trains: the run ends where it goes wrong."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.loop.test_one_rank import World
from tests.train.runs import go_on, started
from workbench.model.errors import TraceError
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.extension.user_object import OwnObjectError, is_looked_at
from workbench.plan.plans.plan import Plan
from workbench.train.data.reading import DataError

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)


@torch.fx.wrap
def centred_where_large(x):
    return torch.where(x.abs().amax() > 25, x - x.mean(0), x)


@torch.fx.wrap
def doubled(x, factor):
    return factor * x


@torch.fx.wrap
def in_rows(x, *, shape):
    return x.view(shape)


@torch.fx.wrap
def once_and_twice(x):
    return x, x.repeat_interleave(2, 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(centred_where_large(self.first(x)))


class Doubling(Net):
    def forward(self, x):
        return self.last(doubled(self.first(x), factor=0.5))


class OfSize(Net):
    def forward(self, x):
        return self.last(in_rows(self.first(x), shape=(x.shape[0], 8)))


class Twice(Net):
    def forward(self, x):
        once, twice = once_and_twice(self.first(x))
        return self.last(once + twice[::2])


def trained(net, folder: Path, steps=40, **fields):
    """Trains on one rank until the end, with a rate that moves the outputs away."""
    graph = trace(net, input_shape=(6,))
    given = dict(data=DATA, batch_size=16, steps=steps, optimizer=SGD(lr=2.0), precision="fp64")
    run = Experiment(plan=Plan.data_parallel(graph, 1), **given | fields)
    world, weights = World(), initialize(graph, 0, folder, module=net)
    state = started(world, run, weights)
    go_on(state, range(steps))
    return state


def plain():
    return nn.Sequential(nn.Linear(6, 3))


def growing(out, y):
    """A loss that drives outputs up, to where others mix samples."""
    return -out.square().mean(1)


def test_the_first_calls_are_looked_at_and_then_ever_fewer():
    assert [n for n in range(1, 100) if is_looked_at(n)] == [*range(1, 17), 32, 64]


def test_a_function_in_forward_that_mixes_samples_late(tmp_path):
    with pytest.raises(TraceError, match="layer 'centred_where_large' mixes samples, or keeps"):
        trained(Net(), tmp_path, loss=growing)


@pytest.mark.parametrize("net", [Doubling, OfSize, Twice])
def test_numbers_sizes_and_outputs_of_unlike_rows_are_taken(net, tmp_path):
    trained(net(), tmp_path, optimizer=SGD(lr=0.1))


def mean_of_far_rows(out, y):
    each = F.cross_entropy(out, y, reduction="none")
    far = out.detach().abs().amax(1) > 300
    return each[far].mean() if far.any() else each.mean()


def test_a_loss_that_mixes_rows_far_away_is_refused_when_it_comes_there(tmp_path):
    class Loud(nn.Linear):
        def forward(self, x):
            return 500 * super().forward(x)

    trained(plain(), tmp_path, loss=mean_of_far_rows)
    with pytest.raises(OwnObjectError, match=r"must not depend on others.*outputs were from -?\d"):
        trained(Loud(6, 3), tmp_path, loss=mean_of_far_rows)


class Late(TensorDataset):
    """A sample is another one from the hundredth read on."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        x, y = super().__getitem__(index)
        return (x if self.reads < 200 else x + 1), y


def test_a_sample_that_changes_late_is_seen_when_it_is_read_again(tmp_path):
    with pytest.raises(DataError, match="is another one when it is read again"):
        trained(plain(), tmp_path, data=Late(*DATA.tensors), optimizer=SGD(lr=0.1))


SMALL = TensorDataset(torch.cat([torch.rand(32, 6), torch.rand(32, 6) + 9]), torch.arange(64) % 3)


def normalised_where_large(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return (inputs / inputs.max() if inputs.max() > 5 else inputs), targets


def test_a_collate_function_that_mixes_rows_of_some_samples(tmp_path):
    from workbench.plan.experiment.task import TorchData

    data = TorchData(train=SMALL, collate=normalised_where_large)
    with pytest.raises(DataError, match="the collate function mixes rows: inputs of"):
        trained(plain(), tmp_path, data=data, optimizer=SGD(lr=0.1))
