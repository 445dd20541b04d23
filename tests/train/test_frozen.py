"""Models that are trained in part: what no gradient reaches stays as one process leaves it."""

import pytest
import torch
from torch import nn

from tests.layers import nets
from tests.train import frozen
from tests.train.frozen import Detached, Keeps, Net, evaluating, experiment
from tests.train.runs import go_on, is_exact, pieces_of, started, verified
from workbench.client.verifying import experiment_for
from workbench.layers.cut_model import group_specs
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.model.weights.slices import WeightsFile
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
def test_any_plan_is_what_one_process_computes(on_ranks, made, tmp_path, net, plan):
    module, graph, _ = made[net]
    found = verified(on_ranks, tmp_path, experiment(PLANS[plan](graph)), module)
    assert found.exact, found
    assert {d.name for d in found.differences if d.what == "gradient"} == set(graph.trainable)


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
def test_any_strategy_is_what_one_process_computes(on_ranks, made, tmp_path, net, fields):
    module, graph, _ = made[net]
    run = experiment(Plan.data_parallel(graph, 3, (1, 0, 2)), **fields)
    alike = run.replace(sync=Synchronous()) if isinstance(run.sync, LocalSGD) else run
    assert is_exact(found := verified(on_ranks, tmp_path, run, module, like=alike), run), found


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
    parameters = dict(module.named_parameters())
    for rank, (held, remembered) in enumerate(on_ranks(4, left, run, weights)):
        for name, parameter in parameters.items():
            initial = nets.piece_of(plan, name, parameter.detach().double(), rank)
            assert torch.equal(held[name], initial) != name.startswith("features")
        assert all(name.startswith("features") for name in remembered)


def left(world, run, weights):
    """This rank's pieces, and the parameters of which something is remembered."""
    state = started(world, run, weights)
    go_on(state, range(run.steps))
    state.strategy.settle()
    return pieces_of(state), [n for n, one in state.updater.remembered.items() if one.names]


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
    plan = Plan.data_parallel(graph, 2).with_layer("first", scheme="shard_in", group_size=2)
    plan = plan.with_layer("last", scheme="shard_out", group_size=2)
    assert verified(on_ranks, tmp_path, experiment(plan.with_recompute(*again)), module).exact


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
    write_reference(run, weights, tmp_path / "start", tmp_path / "reference")
    expected = WeightsFile(tmp_path / "reference")
    kept = [name for name in expected.names if name.startswith(("weight/", "buffer/"))]
    assert {name.partition("/")[2] for name in kept} == set(found)
    for name in kept:
        tensor = expected.read(name)
        torch.testing.assert_close(found[name.partition("/")[2]], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("net", ["frozen norm", "detached", "norm in eval mode"])
def test_local_statistics_are_those_of_one_process(on_ranks, made, tmp_path, net):
    module, graph, _ = made[net]
    plan = Plan.data_parallel(graph, 2).with_layer("head.0", scheme="shard_in", group_size=2)
    given = dict(batch_size=None, precision="fp64", optimizer=None, data=None, seed=0)
    run = experiment_for(plan.with_batch_norm("local"), steps=2, **given)
    verification = verified(on_ranks, tmp_path, run, module)
    assert verification.exact, verification
    names = {difference.name for difference in verification.differences}
    assert {name for name, _ in module.named_parameters()} <= names


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
