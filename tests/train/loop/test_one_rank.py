"""Steps of a rank that is alone, held against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.train.checkpoint.saving import Alone
from workbench.comm.groups.record import Recorder
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD, Pipelined, Synthetic
from workbench.plan.plan import Plan
from workbench.train.data.feed import rows_of_step
from workbench.train.data.opening import open_data
from workbench.train.loop.state import RankState, group_specs_of


class World(Alone):
    """With what a rank needs to train."""

    device = torch.device("cpu")

    def __init__(self):
        self.recorder = Recorder()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


GRAPH = trace(net(), input_shape=(6,))
DATA = Synthetic(samples=22, classes=3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def started(weights, **fields):
    given = dict(data=DATA, batch_size=8, steps=6, precision="fp64", seed=3)
    given["optimizer"] = SGD(lr=0.1, momentum=0.9)
    run = Experiment(plan=Plan.data_parallel(GRAPH, 1), **given | fields)
    world = World()
    return RankState.start(run, world, world.groups(group_specs_of(run.plan)), weights, None)


def plain(steps, late):
    """Losses and weights after so many steps, in plain torch."""
    model, data = net().double(), open_data(DATA, (6,), 3, "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, flying = [], []
    for step in range(steps):
        inputs, labels = data.batch(rows_of_step(22, 8, 3, step))
        loss = F.cross_entropy(model(inputs.double()), labels)
        losses.append(loss.item())
        flying.append(torch.autograd.grad(loss, list(model.parameters())))
        if len(flying) > late:
            for parameter, gradient in zip(model.parameters(), flying.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(state, steps):
    losses = []
    for step in range(steps):
        losses.append(state.stepper.run(step).loss)
        state.stepper.update()
    return losses, {name: p.detach().clone() for name, p in state.model.pieces().items()}


@pytest.mark.parametrize(
    ("fields", "late"),
    [
        ({}, 0),
        ({"accumulate": 3}, 0),
        ({"shard_optimizer": True}, 0),
        ({"sync": LocalSGD(every=2)}, 0),
        ({"sync": Pipelined(width=2)}, 1),
        ({"sync": Pipelined(width=3)}, 2),
    ],
    ids=str,
)
def test_a_rank_trains_as_plain_torch_does(weights, fields, late):
    """Also over an epoch's last batch, of 6 samples."""
    found, left = trained(started(weights, **fields), 5)
    expected, then = plain(5, late)
    assert found == pytest.approx(expected, rel=1e-9)
    assert left.keys() == then.keys()
    for name, piece in left.items():
        torch.testing.assert_close(piece, then[name], rtol=1e-9, atol=1e-12)


def test_a_step_gives_gradients_of_the_mean(weights):
    state = started(weights, accumulate=2)
    result = state.stepper.run(0)
    model, data = net().double(), open_data(DATA, (6,), 3, "train")
    inputs, labels = data.batch(rows_of_step(22, 8, 3, 0))
    F.cross_entropy(model(inputs.double()), labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.model.trainable()[name].grad, parameter.grad)
    assert [batch.first_row for batch in result.batches] == [0, 4]
    assert result.outputs[0].shape == (4, 3)
    torch.testing.assert_close(result.outputs[0], model(inputs.double())[4:])


def test_gradients_of_the_step_before_are_forgotten(weights):
    state = started(weights)
    state.stepper.run(0)
    first = {name: p.grad.clone() for name, p in state.model.trainable().items()}
    state.stepper.run(0)
    for name, parameter in state.model.trainable().items():
        torch.testing.assert_close(parameter.grad, first[name])


def test_a_norm_is_clipped_before_weights_move(weights):
    state = started(weights, optimizer=SGD(lr=1.0), clip_norm=0.01)
    before = {name: p.detach().clone() for name, p in state.model.pieces().items()}
    _, after = trained(state, 1)
    moved = sum(float((after[name] - before[name]).square().sum()) for name in before) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)
