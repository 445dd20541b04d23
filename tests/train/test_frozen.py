"""Models that are trained in part: what no gradient reaches stays as one process leaves it."""

import pytest

from tests.train import frozen
from tests.train.frozen import Detached, Keeps, Net, check, evaluating, experiment, plain
from workbench.model.trace import trace
from workbench.model.weights import initialize
from workbench.plan.plan import Plan

NETS = {
    "unused": Net,
    "frozen norm": lambda: frozen.frozen(Net, "features.1", "features.5.bias"),
    "frozen features": lambda: frozen.frozen(Net, "features"),
    "last layer": lambda: frozen.frozen(but="head.4"),
    "frozen classifier": lambda: frozen.frozen(Net, "head"),
    "biases": lambda: frozen.frozen(Net, "features", "head.0.weight", "head.2.weight"),
    "detached": Detached,
    "norm in eval mode": lambda: evaluating(Net(), "features.1"),
    "frozen norms in eval mode": lambda: evaluating(
        frozen.frozen(Net, "features.1", "features.5"), "features.1", "features.5"
    ),
    "kept by train()": lambda: Keeps().train(),
}


def in_three(graph, **more):
    plan = Plan.data_parallel(graph, 3).with_layer("head.0", scheme="shard_out", shares=(2, 0, 1))
    return plan.with_layer("head.2", scheme="shard_in").with_layer("head.4", scheme="shard_out")


PLANS = {
    "rows": lambda graph: Plan.data_parallel(graph, 3, (1, 0, 2)),
    "cut": in_three,
    "filters": lambda graph: Plan.filters(graph, 3, (8, 0, 3), grain=1),
    "summands": lambda graph: (
        Plan.data_parallel(graph, 2)
        .with_layer("features.3", scheme="shard_in")
        .with_layer("head.0", scheme="shard_in")
        .with_layer("head.2", scheme="shard_in", shares=(0, 1))
    ),
    "rounds": lambda graph: in_three(graph).with_rounds("B"),
    "recomputed": lambda graph: in_three(graph).with_recompute("features.[1-4]", "head.[0-3]"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each net, the module, its graph and its initial weights."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for name, net in NETS.items():
        module = net()
        graph = trace(module, input_shape=frozen.SHAPE)
        found[name] = module, graph, initialize(graph, 0, folder, module=module)
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", NETS)
def test_any_plan_is_what_a_plain_loop_computes(on_ranks, made, net, plan):
    module, graph, weights = made[net]
    run = experiment(PLANS[plan](graph))
    check(on_ranks(run.plan.world_size, frozen.on_a_rank, run, weights), plain(module, run), run)
