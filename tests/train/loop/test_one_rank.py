"""Steps of a rank that is alone, held against plain torch."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.checkpoint.saving import Alone
from tests.train.runs import go_on, pieces_of
from tests.train.strategies.own import Adaptive, EveryThird, Heavy, Prox, SlowMo
from workbench.comm.messages.recorder import Recorder
from workbench.model.errors import CheckpointError
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    Adam,
    Experiment,
    LocalSGD,
    Loss,
    LRScheduler,
    Metric,
    Pipelined,
    Synthetic,
)
from workbench.plan.experiment.sync import OwnStrategy
from workbench.plan.graph.graph import Input
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint
from workbench.train.checkpoint.saver import Saver, parts
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.data.reading import DataError
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import under
from workbench.train.run.scoring import evaluate
from workbench.train.verify.whole_model import in_one_process


class World(Alone):
    """With what a rank needs to train."""

    device = torch.device("cpu")

    def __init__(self):
        self.recorder = Recorder()

    def excused(self):
        return nullcontext()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


GRAPH = trace(net(), input_shape=(6,))
DATA = Synthetic(samples=22, classes=3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def started(weights, resume=None, **fields):
    given = dict(data=DATA, batch_size=8, steps=6, precision="fp64", seed=3)
    given["optimizer"] = SGD(lr=0.1, momentum=0.9)
    run = Experiment(plan=Plan.data_parallel(GRAPH, 1), **given | fields)
    world = World()
    return RankState.start(run, world, world.groups(group_specs_of(run.plan)), weights, resume)


def plain(steps, late):
    """Losses and weights after so many steps, in plain torch."""
    model, data = net().double(), open_data(DATA, (Input((6,)),), 3, "train")
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
    state = started(weights, **fields)
    found, left = go_on(state, range(5)), pieces_of(state)
    expected, then = plain(5, late)
    assert found == pytest.approx(expected, rel=1e-9)
    assert left.keys() == then.keys()
    for name, piece in left.items():
        torch.testing.assert_close(piece, then[name], rtol=1e-9, atol=1e-12)


def test_a_step_gives_gradients_of_the_mean(weights):
    state = started(weights, accumulate=2)
    result = state.stepper.run(0)
    model, data = net().double(), open_data(DATA, (Input((6,)),), 3, "train")
    inputs, labels = data.batch(rows_of_step(22, 8, 3, 0))
    F.cross_entropy(model(inputs.double()), labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.model.trainable()[name].grad, parameter.grad)
    assert [batch.first_row for batch in result.batches] == [0, 4]
    assert result.outputs[0].shape == (4, 3)
    torch.testing.assert_close(result.outputs[0], model(inputs.double())[4:])


def test_rows_that_a_loss_leaves_out_move_nothing(weights):
    def of_some(scores, labels):
        there = labels > 0
        if not there.any():
            return torch.zeros((), dtype=torch.float64)
        return F.cross_entropy(scores[there], labels[there], reduction="sum")

    labels = torch.arange(22) % 2
    data = TensorDataset(torch.rand(22, 6), labels)
    given = dict(data=data, loss=Loss(of_some, reduction="sum"), batch_size=1)
    state = started(weights, optimizer=SGD(0.1), **given)
    left_out = [step for step in range(6) if labels[rows_of_step(22, 1, 3, step)] == 0]
    before = pieces_of(state)
    after = keep_going(state, left_out)
    assert left_out
    assert all(torch.equal(before[name], piece) for name, piece in after.items())


def test_a_metric_without_a_number_is_noted_before_the_first_step(weights):
    nothing = Metric(lambda out, y: torch.zeros(2), result=lambda n: n[0] / n[1])
    (note,) = started(weights, metrics={"m": nothing}).notes
    assert note.startswith("metric 'm' is nan for outputs of shape (5, 3) and the targets of 5")


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_data_that_the_model_does_not_read_ends_a_run_before_its_first_step(weights, loss):
    right = TensorDataset(torch.rand(22, 6), torch.arange(22) % 3)
    wrong = TensorDataset(torch.ones(22, 6, dtype=torch.uint8), torch.arange(22) % 3)
    for split, data in (("train", (wrong, right)), ("test", (right, wrong))):
        with pytest.raises(DataError, match=f"{split} data .* are torch.uint8, and the model"):
            started(weights, data=data, loss=loss)


def test_labels_of_the_test_split_are_classes(weights):
    right, wrong = (TensorDataset(torch.rand(6, 6), torch.arange(6) % n) for n in (3, 4))
    with pytest.raises(DataError, match="label 3 is none of the 3 classes"):
        started(weights, data=(right, wrong))


def test_gradients_of_the_step_before_are_forgotten(weights):
    state = started(weights)
    state.stepper.run(0)
    first = {name: p.grad.clone() for name, p in state.model.trainable().items()}
    state.stepper.run(0)
    for name, parameter in state.model.trainable().items():
        torch.testing.assert_close(parameter.grad, first[name])


def keep_going(state, steps):
    go_on(state, steps)
    return pieces_of(state)


def saved(state, directory, done):
    """The folder of a checkpoint of this state."""
    state.strategy.settle()
    saver, strategy = Saver(directory, state.everyone), state.strategy
    given = dict(in_flight=strategy.in_flight, residuals=strategy.residuals)
    part, files = parts(done, state.model, state.updater, **given)
    saver.begin(done, part, files, state.experiment)
    saver.finish()
    saver.close()
    return saver.newest


RUNS = [
    {"ema": 0.5},
    {"optimizer": Adam(lr=0.01), "shard_optimizer": True},
    {"sync": LocalSGD(every=2, momentum="average")},
    {"sync": Pipelined(width=3)},
    {"sync": Pipelined(width=2, warmup=4)},
    {"schedule": LRScheduler("StepLR", step_size=2, gamma=0.5)},
]


@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_a_rank_goes_on_from_its_checkpoint(weights, tmp_path, fields):
    expected = keep_going(started(weights, **fields), range(6))
    state = started(weights, **fields)
    keep_going(state, range(3))
    path = saved(state, tmp_path, 3)
    again = started(weights, resume=path, **fields)
    found = keep_going(again, range(3, 6))
    assert all(torch.equal(found[name], piece) for name, piece in expected.items())


@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_a_rank_goes_on_under_a_plan(weights, fields):
    expected = keep_going(started(weights, **fields), range(6))
    state = started(weights, **fields)
    keep_going(state, range(3))
    state.strategy.settle()
    after = under(state, Plan.data_parallel(GRAPH, 1), 3)
    found = keep_going(after, range(3, 6))
    assert all(torch.equal(found[name], piece) for name, piece in expected.items())


@pytest.mark.parametrize("batch_size", [2, 5, 8])
def test_an_evaluation_is_a_mean_over_the_test_split(weights, batch_size):
    state = started(weights)
    data = state.test_data
    inputs, labels = data.batch(torch.arange(len(data)))
    scores = net().double()(inputs.double())
    found = evaluate(
        state.model,
        data,
        batch_size,
        state.everyone,
        state.world.device,
        torch.float64,
        state.scoring,
    )
    assert len(data) == 5
    assert found["loss"] == pytest.approx(F.cross_entropy(scores, labels).item())
    assert found["accuracy"] == (scores.argmax(1) == labels).double().mean().item()
    assert state.model.training


@pytest.mark.parametrize(
    "strategy",
    [
        EveryThird(),
        SlowMo(every=2),
        SlowMo(every=2, momentum="reset", warmup=1),
        Prox(),
        Adaptive(1),
        Heavy(),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_a_strategy_of_one_s_own_is_as_in_plain_torch(weights, strategy):
    state = started(weights, sync=OwnStrategy(strategy))
    keep_going(state, range(state.experiment.steps))
    state.strategy.settle()
    expected = in_one_process(state.experiment, net())
    for name, piece in state.model.pieces().items():
        torch.testing.assert_close(piece.detach(), expected[name], rtol=1e-9, atol=1e-12)


def test_a_step_says_what_it_did(weights):
    state = started(weights)
    found = [state.stepper.run(step) for step in (0, 2)]
    assert [result.samples for result in found] == [8, 6]
    assert [result.batches[0].rows for result in found] == [(8,), (6,)]
    assert found[0].blocked_s == 0.0
    assert 0 < found[0].seconds < 60


def test_an_update_needs_a_step(weights):
    state = started(weights)
    with pytest.raises(RuntimeError, match="no step has been run"):
        state.stepper.update()
    state.stepper.run(0)
    state.stepper.update()
    with pytest.raises(RuntimeError, match="no step has been run"):
        state.stepper.update()


def test_another_optimizer_or_none_s_averages_are_refused(weights, tmp_path):
    path = saved(started(weights), tmp_path, 0)
    with pytest.raises(CheckpointError, match="no averaged weights: it was saved without ema"):
        started(weights, resume=path, ema=0.5)
    with pytest.raises(CheckpointError, match=r"has no exp_avg and exp_avg_sq and step for Adam"):
        started(weights, resume=path, optimizer=Adam(lr=0.01))
    with pytest.raises(CheckpointError, match="has no slow and speed of the strategy"):
        started(weights, resume=path, sync=OwnStrategy(SlowMo()))


def test_a_checkpoint_is_a_state_dict(weights, tmp_path):
    state = started(weights, ema=0.5)
    moved = keep_going(state, range(2))
    path = saved(state, tmp_path, 2)
    found = checkpoint.state_dict(path, GRAPH)
    assert all(torch.equal(found[name], piece) for name, piece in moved.items())
    with state.updater.averaged():
        averaged = pieces_of(state)
    found = checkpoint.state_dict(path, GRAPH, ema=True)
    assert all(torch.equal(found[name], piece) for name, piece in averaged.items())
    with pytest.raises(CheckpointError, match="no averaged weights: they are there if"):
        checkpoint.state_dict(saved(started(weights), tmp_path / "other", 0), GRAPH, ema=True)
