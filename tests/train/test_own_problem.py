"""A user's own data, loss and metrics under any plan: what a loop of torch's own computes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.layers.nets import piece_of
from tests.train.data.spirals import Spirals, counts, f1, focal, paired
from tests.train.runs import evaluated, go_on, is_exact, pieces_of, started, verified
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
from workbench.train.run.reshard import under

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


def check(on_ranks, tmp_path, run):
    found = verified(on_ranks, tmp_path, run, net())
    assert is_exact(found, run), found
    assert {d.name for d in found.differences if d.what == "evaluation"} == {"loss", "f1"}


def mean(outputs, targets):
    return focal(outputs, targets).mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PLANS)
def test_a_loss_for_each_row(on_ranks, tmp_path, name, strategy):
    check(on_ranks, tmp_path, experiment(PLANS[name], **STRATEGIES[strategy]))


@pytest.mark.parametrize("name", ["a rank without rows", "cut outputs"])
def test_a_number_for_all_rows_in_micro_batches(on_ranks, tmp_path, name):
    check(on_ranks, tmp_path, experiment(PLANS[name], loss=mean, accumulate=3))


def total(outputs, targets):
    return focal(outputs, targets).sum()


@pytest.mark.parametrize("name", ["a rank without rows", "rounds"])
def test_a_sum(on_ranks, tmp_path, name):
    loss = Loss(total, reduction="sum")
    run = experiment(PLANS[name], loss=loss, optimizer=SGD(lr=0.03, momentum=0.9))
    check(on_ranks, tmp_path, run)


def plain(outputs, targets):
    """Focal loss without the weights, which `by_row` has."""
    return focal(outputs, {**targets, "weight": torch.ones_like(targets["weight"])})


def by_row(targets):
    return targets["weight"] * (1 + targets["kind"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["a rank without rows", "cut outputs", "rounds"])
def test_a_weighted_mean(on_ranks, tmp_path, name, strategy):
    """The weights of all rows count, on whatever ranks, in whatever micro-batches and rounds."""
    loss = Loss(plain, weights=by_row)
    run = experiment(PLANS[name], loss=loss, accumulate=2, **STRATEGIES[strategy])
    check(on_ranks, tmp_path, run)


def test_weights_need_whole_batches():
    loss = Loss(plain, weights=by_row)
    with pytest.raises(ExperimentError, match="weights step before under LocalSGD"):
        experiment(UNEQUAL, loss=loss, sync=LocalSGD(every=2))
    with pytest.raises(ExperimentError, match="with reduction='sum' multiply"):
        Loss(plain, reduction="sum", weights=by_row)


def resharded(world, run, weights, plan):
    """Pieces and figures in the end, under another plan after three steps; None: the same."""
    state = started(world, run, weights)
    go_on(state, range(3))
    if plan is not None:
        state = under(state, plan, 3)
    go_on(state, range(3, run.steps))
    return pieces_of(state), evaluated(state)


def test_a_run_keeps_its_loss_and_metrics_under_another_plan(on_ranks, tmp_path):
    run = experiment(UNEQUAL, loss=Loss(plain, weights=by_row), accumulate=2)
    weights = initialize(GRAPH, 0, tmp_path, module=net())
    whole, figures = on_ranks(RANKS, resharded, run, weights, None)[0]
    for rank, (pieces, evaluation) in enumerate(on_ranks(RANKS, resharded, run, weights, CUT)):
        for name, piece in pieces.items():
            assert_close(piece, piece_of(CUT, name, whole[name], rank), rtol=1e-10, atol=1e-12)
        assert evaluation == pytest.approx(figures, rel=1e-10)
