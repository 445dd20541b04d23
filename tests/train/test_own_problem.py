"""A user's own data, loss and metrics under any plan: what a loop of torch's own computes."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.layers.nets import piece_of
from tests.train.data.spirals import Spirals, counts, f1, focal, paired
from workbench.comm.groups.world import World
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    Experiment,
    LocalSGD,
    Loss,
    Metric,
    ParameterServer,
    Synchronous,
    TorchData,
)
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import under
from workbench.train.run.scoring import evaluate

RANKS, ROWS, STEPS, SAMPLES = 3, 10, 7, 33  # an epoch's last batch has 3 rows
TRAIN, TEST = Spirals(SAMPLES, 0), Spirals(17, 1)


def net():
    torch.manual_seed(0)
    layers = (nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


GRAPH = trace(net(), input_shape=(2,))
PARALLEL = Plan.data_parallel(GRAPH, RANKS)
UNEQUAL = Plan.data_parallel(GRAPH, RANKS, (3, 1, 0))
OUT = PARALLEL.with_layer("2", scheme="shard_out", group_size=3, shares=(3, 2, 1))
CUT = OUT.with_layer("4", scheme="shard_out", group_size=3)
PLANS = {
    "data parallel": PARALLEL,
    "a rank without rows": UNEQUAL,
    "cut": OUT,
    "cut outputs": CUT,
    "outputs of a group's rows": OUT.with_layer("4", scheme="shard_in", group_size=3),
    "rounds": OUT.with_rounds("B"),
}
STRATEGIES = {
    "synchronous": {},
    "sharded and fused": dict(sync=Synchronous(algorithm="direct"), shard_optimizer=True),
    "parameter server": dict(sync=ParameterServer(server=1)),
}


def experiment(plan, **fields):
    given = dict(
        data=TorchData(train=TRAIN, test=TEST, collate=paired),
        loss=focal,
        metrics={"f1": Metric(counts, result=f1)},
        batch_size=ROWS,
        optimizer=SGD(lr=0.3, momentum=0.9),
        steps=STEPS,
        precision="fp64",
        seed=4,
    )
    return Experiment(plan=plan, **given | fields)


def script(run, loss, lr=0.3):
    """The same as people write it; the order of samples is that of the seed and the epoch."""
    model = deepcopy(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(run.steps):
        epoch, position = divmod(step, -(-SAMPLES // ROWS))
        order = np.random.default_rng((run.seed, epoch)).permutation(SAMPLES)
        chosen = order[position * ROWS : (position + 1) * ROWS]
        inputs, targets = paired([TRAIN[index] for index in chosen])
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = paired([TEST[index] for index in range(len(TEST))])
    with torch.no_grad():
        outputs = model(inputs)
        figures = loss(outputs, targets).item(), f1(counts(outputs, targets).double()).item()
    return {name: piece.detach() for name, piece in model.named_parameters()}, figures


def on_a_rank(world: World, run: Experiment, weights: Path):
    groups = world.groups(group_specs_of(run.plan))
    state = RankState.start(run, world, groups, weights, None)
    for step in range(run.steps):
        state.stepper.run(step)
        state.stepper.update()
    pieces = {name: piece.detach().clone() for name, piece in state.model.pieces().items()}
    given = state.test_data, 5, state.everyone, world.device, state.stepper.dtype, state.scoring
    return pieces, evaluate(state.model, *given)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def check(on_ranks, weights, run, loss):
    expected, figures = script(run, loss, run.optimizer.lr)
    for rank, (pieces, evaluation) in enumerate(on_ranks(RANKS, on_a_rank, run, weights)):
        for name, piece in pieces.items():
            mine = piece_of(run.plan, name, expected[name], rank)
            assert_close(piece, mine, rtol=1e-10, atol=1e-12)
        assert (evaluation["loss"], evaluation["f1"]) == pytest.approx(figures, rel=1e-10)


def mean(outputs, targets):
    return focal(outputs, targets).mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PLANS)
def test_a_loss_for_each_row(on_ranks, weights, name, strategy):
    check(on_ranks, weights, experiment(PLANS[name], **STRATEGIES[strategy]), mean)


@pytest.mark.parametrize("name", ["a rank without rows", "cut outputs"])
def test_a_number_for_all_rows_in_micro_batches(on_ranks, weights, name):
    check(on_ranks, weights, experiment(PLANS[name], loss=mean, accumulate=3), mean)


def total(outputs, targets):
    return focal(outputs, targets).sum()


@pytest.mark.parametrize("name", ["a rank without rows", "rounds"])
def test_a_sum(on_ranks, weights, name):
    loss = Loss(total, reduction="sum")
    run = experiment(PLANS[name], loss=loss, optimizer=SGD(lr=0.03, momentum=0.9))
    check(on_ranks, weights, run, total)


def plain(outputs, targets):
    """Focal loss without the weights, which `by_row` has."""
    return focal(outputs, {**targets, "weight": torch.ones_like(targets["weight"])})


def by_row(targets):
    return targets["weight"] * (1 + targets["kind"])


def weighted_mean(outputs, targets):
    weights = by_row(targets)
    return (plain(outputs, targets) * weights).sum() / weights.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["a rank without rows", "cut outputs", "rounds"])
def test_a_weighted_mean(on_ranks, weights, name, strategy):
    """The weights of all rows count, on whatever ranks, in whatever micro-batches and rounds."""
    loss = Loss(plain, weights=by_row)
    run = experiment(PLANS[name], loss=loss, accumulate=2, **STRATEGIES[strategy])
    check(on_ranks, weights, run, weighted_mean)


def test_weights_need_whole_batches():
    loss = Loss(plain, weights=by_row)
    with pytest.raises(ExperimentError, match="weights step before under LocalSGD"):
        experiment(UNEQUAL, loss=loss, sync=LocalSGD(every=2))
    with pytest.raises(ExperimentError, match="with reduction='sum' multiply"):
        Loss(plain, reduction="sum", weights=by_row)


def reshard(world: World, run: Experiment, weights: Path, plan: Plan):
    """As `on_a_rank`, under another plan after three steps."""
    groups = world.groups(group_specs_of(run.plan))
    state = RankState.start(run, world, groups, weights, None)
    for step in range(run.steps):
        if step == 3:
            state = under(state, plan, step)
        state.stepper.run(step)
        state.stepper.update()
    pieces = {name: piece.detach().clone() for name, piece in state.model.pieces().items()}
    given = state.test_data, 5, state.everyone, world.device, state.stepper.dtype, state.scoring
    return pieces, evaluate(state.model, *given)


def test_a_run_keeps_its_loss_and_metrics_under_another_plan(on_ranks, weights):
    run = experiment(UNEQUAL, loss=Loss(plain, weights=by_row), accumulate=2)
    expected, figures = script(run, weighted_mean)
    for rank, (pieces, evaluation) in enumerate(on_ranks(RANKS, reshard, run, weights, CUT)):
        for name, piece in pieces.items():
            assert_close(piece, piece_of(CUT, name, expected[name], rank), rtol=1e-10, atol=1e-12)
        assert (evaluation["loss"], evaluation["f1"]) == pytest.approx(figures, rel=1e-10)
