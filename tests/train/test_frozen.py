"""Models that are trained in part: what no gradient reaches stays as one process leaves it."""

import pytest
import torch
from torch import nn

from tests.layers import nets
from tests.train import frozen
from tests.train.frozen import Detached, Keeps, Net, check, evaluating, experiment, plain
from workbench.client.verifying import experiment_for, merge
from workbench.layers.cut_model import group_specs
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
)
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.plans.plan import Plan
from workbench.store.messages import StopRequest
from workbench.train.checkpoint.checkpoint import latest, state_dict
from workbench.train.run.loop import train
from workbench.train.verify.verify import compare
from workbench.train.verify.whole_model import write_reference

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

QUICK = ("biases", "norm in eval mode")  # under every plan; the others under one


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each net, the module, its graph and its initial weights."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for name, net in NETS.items():
        module = net()
        graph = trace(module, input_shape=frozen.SHAPE)
        found[name] = module, graph, initialize(graph, 0, folder, module=module)
    return found


PAIRS = [
    pytest.param(net, plan, marks=() if plan == "cut" or net in QUICK else pytest.mark.slow)
    for net in NETS
    for plan in PLANS
]


@pytest.mark.parametrize(("net", "plan"), PAIRS)
def test_any_plan_is_what_a_plain_loop_computes(on_ranks, made, net, plan):
    module, graph, weights = made[net]
    run = experiment(PLANS[plan](graph))
    check(on_ranks(run.plan.world_size, frozen.on_a_rank, run, weights), plain(module, run), run)


STRATEGIES = {
    "sharded": dict(shard_optimizer=True),
    "fused": dict(shard_optimizer=True, sync=Synchronous(algorithm="direct")),
    "ring": dict(sync=Synchronous(algorithm="ring", bucket_bytes=600)),
    "server": dict(sync=ParameterServer(server=1)),
    "local": dict(sync=LocalSGD(every=1), optimizer=SGD(lr=0.1, weight_decay=0.1)),
    "micro-batches": dict(sync=Pipelined(width=1)),
}


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("net", ["last layer", "detached"])
def test_any_strategy_is_what_a_plain_loop_computes(on_ranks, made, net, fields):
    module, graph, weights = made[net]
    run = experiment(Plan.data_parallel(graph, 3, (1, 0, 2)), **fields)
    ranks = on_ranks(3, frozen.on_a_rank, run, weights)
    check(ranks, plain(module, run), run, gradients=False)


INEXACT = {
    "pipelined": dict(sync=Pipelined(width=2, codec="fp16")),
    "per round": dict(sync=Synchronous(per_round=True)),
    "averaged": dict(sync=LocalSGD(every=2, momentum="average")),
}


@pytest.mark.parametrize("fields", INEXACT.values(), ids=INEXACT.keys())
def test_what_is_inexact_leaves_frozen_parameters_alone(on_ranks, made, fields):
    module, graph, weights = made["frozen classifier"]
    whole = Plan.data_parallel(graph, 4)
    plan = whole.with_layer("head.0", scheme="shard_out", group_size=2).with_rounds("B")
    run = experiment(plan, **fields)
    for rank, found in enumerate(on_ranks(4, frozen.on_a_rank, run, weights)):
        for name, gradient in found.gradients.items():
            trained = name.startswith("features")
            assert (gradient is not None) == trained
            initial = nets.piece_of(plan, name, module.state_dict()[name].double(), rank)
            assert torch.equal(found.held[name], initial) != trained
        assert all("features" in entry for entry in found.state)


class Biases(nn.Module):
    """A layer that reads the input itself, of which the bias alone is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(108, 9), nn.Linear(9, frozen.CLASSES)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.relu(self.first(torch.flatten(x, 1))))


@pytest.mark.parametrize("again", [(), ("flatten", "first")], ids=["kept", "recomputed"])
def test_ranks_agree_on_what_needs_a_gradient(on_ranks, tmp_path, again):
    """The bias is added by rank 0 alone: without it, nothing on rank 1 needs one."""
    module = Biases()
    graph = trace(module, input_shape=frozen.SHAPE)
    weights = initialize(graph, 0, tmp_path, module=module)
    plan = Plan.data_parallel(graph, 2).with_layer("first", scheme="shard_in", group_size=2)
    plan = plan.with_layer("last", scheme="shard_out", group_size=2)
    run = experiment(plan.with_recompute(*again))
    ranks = on_ranks(2, frozen.on_a_rank, run, weights, timeout_s=20.0)
    check(ranks, plain(module, run), run)


def trained_through(config, run, weights, directory, resume):
    """A whole session, which leaves a checkpoint."""
    rows = []
    return train(
        config,
        run,
        weights=weights,
        directory=directory,
        resume=resume,
        control=StopRequest(),
        emit=rows.append,
    )


@pytest.mark.parametrize("net", ["detached", "kept by train()", "biases"])
def test_goes_on_from_a_checkpoint_and_back_into_the_module(on_ranks, made, tmp_path, net):
    """Two steps on three ranks, then two on two, loaded into the module that was traced."""
    _, graph, weights = made[net]
    run = experiment(PLANS["cut"](graph), steps=4)
    first = run.replace(steps=2)
    on_ranks.seated(3, trained_through, first, weights, tmp_path, None)
    run = run.replace(plan=PLANS["summands"](graph).with_batch_norm("synchronized"))
    on_ranks.seated(2, trained_through, run, weights, tmp_path, latest(tmp_path))
    found = state_dict(latest(tmp_path), graph)
    NETS[net]().load_state_dict(found)
    expected = plain(NETS[net](), run)
    for name, tensor in expected.held.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("net", ["frozen norm", "detached", "norm in eval mode"])
@pytest.mark.parametrize("batch_norm", ["local", "synchronized"])
def test_verification_compares_all_of_it(on_ranks, made, tmp_path, net, batch_norm):
    module, graph, weights = made[net]
    plan = Plan.data_parallel(graph, 2).with_layer("head.0", scheme="shard_in", group_size=2)
    run = experiment_for(
        plan.with_batch_norm(batch_norm),
        batch_size=None,
        steps=2,
        precision="fp64",
        optimizer=None,
        data=None,
        seed=0,
    )
    start, reference = tmp_path / "start", tmp_path / "reference"
    write_reference(run, weights, start, reference)
    verification = merge(run, on_ranks.seated(2, compared, run, start, reference))
    assert verification.exact, verification
    names = {difference.name for difference in verification.differences}
    assert {name for name, _ in module.named_parameters()} <= names


def compared(config, run, start, reference):
    return compare(config, run, weights=start, reference=reference)[0]


def test_nothing_to_train_is_refused():
    module = Net().requires_grad_(False)
    graph = trace(module, input_shape=frozen.SHAPE)
    with pytest.raises(ExperimentError, match=r"nothing to train in Net: all .* are frozen"):
        experiment(Plan.data_parallel(graph, 2))


def test_a_norm_in_eval_mode_may_stand_behind_a_gather():
    """It mixes no rows, so that the layers behind the gather can run in rounds."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for evaluates in (False, True):
        module[1].train(not evaluates)
        plan = Plan.data_parallel(trace(module, input_shape=(4,)), 2)
        plan = plan.with_batch_norm("synchronized").with_layer("0", scheme="shard_out")
        assert plan.synchronizes(plan.graph["1"]) is not evaluates
        assert any(purpose == "norm" for purpose, _ in group_specs(plan)) is not evaluates
        if evaluates:
            assert plan.with_rounds("B").tail is not None
        else:
            with pytest.raises(PlanError, match="statistics of a part of the rows"):
                plan.with_rounds("B")


def test_plans_are_read_back_with_what_is_frozen(made):
    for _, graph, _ in made.values():
        plan = Plan.data_parallel(graph, 2)
        assert Plan.from_toml(plan.to_toml()).graph.layers == graph.layers
