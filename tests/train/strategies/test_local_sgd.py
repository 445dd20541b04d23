"""Local steps and averaged parameters, against copies that one process keeps."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.train.strategies import own
from tests.train.strategies.own import net
from workbench.model.tracing.trace import trace
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
from workbench.train.checkpoint import checkpoint

SHAPE = (3, 6, 6)
MOMENTUM = SGD(lr=0.05, momentum=0.9)


GRAPH = trace(net(), input_shape=SHAPE)


def plan(world: int, k: int, rounds="BK") -> Plan:
    """Layers 4 cut by its output, 6 whole in the groups: the tail of splitbrain.md section 4."""
    made = Plan.data_parallel(GRAPH, world)
    if k > 1:
        made = made.with_layer("4", scheme="shard_out", group_size=k)
        made = made.with_layer("6", scheme="duplicate", group_size=k)
    return made.with_rounds(rounds)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


@pytest.fixture
def run(whole_run, weights):
    def run(plan, *, resume=None, stop_after=None, **fields):
        values = dict(
            data=Synthetic(samples=30), batch_size=10, optimizer=MOMENTUM, steps=7, precision="fp64"
        )
        experiment = Experiment(plan=plan, **{**values, **fields})
        _, _, (outcome, *_) = whole_run(experiment, weights, resume, stop_after)
        return saved(Path(outcome.checkpoint)), outcome

    return run


def saved(path):
    reader = checkpoint.load(path, GRAPH).reader
    return {name: reader.read(name) for name in reader.names}


def weights_of(tensors):
    return {name: t for name, t in tensors.items() if not name.startswith("optimizer/")}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["BK", "B/K"])
@pytest.mark.parametrize(
    ("optimizer", "momentum", "samples"),
    [
        (MOMENTUM, "keep", 30),
        (SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01), "average", 26),
        (SGD(lr=0.05), "reset", 26),
    ],
)
def test_averaging_every_step_is_synchronous(run, optimizer, momentum, samples, rounds):
    """Ranks have 3, 3, 2 and 2 rows; of 26 samples, the third batch has fewer."""
    fields = dict(optimizer=optimizer, data=Synthetic(samples=samples))
    expected, _ = run(plan(4, 2), sync=Synchronous(), **fields)
    sync = LocalSGD(every=1, momentum=momentum, bucket_bytes=300)
    found, _ = run(plan(4, 2, rounds), sync=sync, **fields)
    for name, tensor in found.items():
        assert_close(tensor, expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", ["keep", "average", "reset"])
@pytest.mark.parametrize(("world", "k", "rounds"), [(3, 1, "BK"), (4, 2, "BK"), (4, 2, "B")])
def test_equals_copies_kept_by_hand(run, weights, world, k, rounds, momentum):
    sync = LocalSGD(every=3, momentum=momentum)
    found, _ = run(plan(world, k, rounds), sync=sync, data=Synthetic(samples=26))
    expected = own.with_means(sync, 7, world, k)
    assert set(weights_of(found)) == set(expected)
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MOMENTUM, AdamW(lr=0.01)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("momentum", ["keep", "average", "reset"])
def test_a_resumed_run_is_the_one_that_went_on(run, momentum, optimizer):
    """Saved after steps 2 and 4, of which neither is due for an averaging."""
    fields = dict(
        sync=LocalSGD(every=3, momentum=momentum), optimizer=optimizer, checkpoint_every=2, steps=8
    )
    went_on, _ = run(plan(4, 2), **fields)
    stopped, outcome = run(plan(4, 2), stop_after=3, **fields)
    assert outcome.step == 4
    resumed, outcome = run(plan(4, 2), resume=Path(outcome.checkpoint), **fields)
    assert outcome.step == 8
    assert set(resumed) == set(went_on)
    assert not torch.equal(resumed["4.weight"], stopped["4.weight"])
    for name, tensor in went_on.items():
        assert torch.equal(resumed[name], tensor), name


@pytest.mark.parametrize(("k", "every"), [(1, 2), (2, 3), (4, 3)])
def test_traffic_is_that_of_the_formula(run, k, every):
    """splitbrain.md section 6: 2 (N-1)/N P_conv + 2 (G-1)/G P_FC / k every c steps."""
    world, steps = 4, 6
    cut = plan(world, k)
    _, outcome = run(cut, sync=LocalSGD(every=every), steps=steps)
    once = messages = 0
    for size in {placed.group_size for placed in cut.flow.weights.values()}:
        held = [p.piece_numel(0) for p in cut.flow.weights.values() if p.group_size == size]
        replicas = world // size
        once += 2 * (replicas - 1) / replicas * sum(held) * 8
        messages += 2 * (replicas - 1)
    # Once more for the checkpoint at the end: of the momentum, which has as many elements.
    times = steps // every + 1
    found = [row for row in outcome.traffic if row[2] == "parameters"]
    assert sum(row[5] for row in found) == messages * times
    assert sum(row[6] for row in found) == pytest.approx(once * times, rel=0.01)
    assert not any(row[2] == "gradients" for row in outcome.traffic)
