"""Whole steps of plans that recompute, against those that keep everything."""

import pytest

from tests.train import small
from tests.train.runs import same, trained
from tests.train.small import GRAPH
from tests.train.strategies.test_local_sgd import GRAPH as TAILED
from tests.train.strategies.test_local_sgd import net as tailed
from tests.train.strategies.test_local_sgd import plan as tailed_plan
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan

MOMENTUM = SGD(lr=0.05, momentum=0.9)
FIELDS = dict(data=Synthetic(samples=50), batch_size=20, steps=3)
HYBRID = Plan.hybrid(GRAPH, 4, 2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    nets = {GRAPH: small.net(), TAILED: tailed()}
    return {
        graph: initialize(graph, 0, folder / graph.fingerprint, module=module)
        for graph, module in nets.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        (HYBRID.with_batch_norm("synchronized"), dict(optimizer=AdamW(), accumulate=2)),
        (HYBRID, dict(optimizer=MOMENTUM, precision="bf16")),
        (HYBRID.with_rounds("B"), dict(optimizer=MOMENTUM, shard_optimizer=True)),
        (
            tailed_plan(4, 2, "B/K"),
            dict(optimizer=AdamW(), sync=Synchronous(per_round=True, bucket_bytes=500)),
        ),
        (tailed_plan(4, 2), dict(optimizer=MOMENTUM, sync=LocalSGD(every=2))),
    ],
    ids=["accumulate", "bf16", "rounds", "per-round", "local"],
)
def test_steps_leave_the_same_bits(on_either, weights, plan, fields):
    """Weights, running statistics, momentum; all layers, and all but two."""
    run = Experiment(plan=plan, **FIELDS, **fields)
    kept = on_either(4, trained, run, weights[plan.graph])
    everything = plan.with_recompute("*")
    for again in (everything, everything.with_recompute("1", "6", recompute=False)):
        assert again.segments
        found = on_either(4, trained, run.replace(plan=again), weights[plan.graph])
        for mine, expected in zip(found, kept, strict=True):
            same(mine[0], expected[0])
