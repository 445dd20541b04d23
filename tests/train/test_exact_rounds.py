"""`verify` on ranks: rounds are exact."""

import pytest

from tests.train.small import net
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verify import compare, write_reference

GRAPH = trace(net(), input_shape=(3, 8, 8))


def experiment(plan: Plan, **fields) -> Experiment:
    values = dict(
        data=Synthetic(samples=26),
        batch_size=10,  # three steps an epoch, the last one short
        optimizer=SGD(lr=0.05, momentum=0.9),
        steps=4,
        precision="fp64",
    )
    return Experiment(plan=plan, **{**values, **fields})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


@pytest.mark.parametrize("mode", ["local", "synchronized"])
@pytest.mark.parametrize("rounds", ["B", "B/K"])
@pytest.mark.parametrize(("world", "k"), [(4, 2), (3, 3)])
def test_rounds_are_exact(on_ranks, weights, tmp_path, rounds, mode, world, k):
    plan = Plan.hybrid(GRAPH, world, k, rounds=rounds).with_batch_norm(mode)
    run = experiment(plan)
    start, reference = tmp_path / "start", tmp_path / "reference"
    write_reference(run, weights, start, reference)
    found = on_ranks.seated(world, seen, run, start, reference)
    differences = [difference for rank in found for difference in rank]
    assert {d.what for d in differences} >= {"output", "gradient", "weight"}
    worst = max(differences, key=lambda d: d.error)
    assert worst.error < 1e-10, worst


def seen(config, run, weights, reference):
    return compare(config, run, weights=weights, reference=reference)[0]
