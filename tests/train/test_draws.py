"""Models that draw random numbers: whole steps on ranks, against the module itself."""

from pathlib import Path

import pytest
import torch

from tests.layers import drawing, nets
from tests.train.exact import Case, check, split
from tests.train.runs import same, session, trained, verified
from workbench.client.verifying import experiment_for
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import AdamW, Experiment, Synthetic
from workbench.plan.plans.plan import Plan

FIELDS = dict(
    data=Synthetic(samples=24, classes=5),
    batch_size=8,
    optimizer=AdamW(),
    precision="fp64",
    steps=3,
)
GRAPHS = nets.Graphs()


@pytest.mark.slow
@pytest.mark.parametrize("net", drawing.NETS)
def test_any_split_draws_what_one_process_draws(on_ranks, net):
    """Outputs, gradients, and weights after two steps."""
    graph, rows = GRAPHS[net], ((3, 0, 2), (1, 2, 1))
    linear = [layer.name for layer in graph.layers if layer.kind in ("linear", "conv2d")]
    duplicate = Plan.data_parallel(graph, 3)
    for name in linear:
        duplicate = duplicate.with_layer(name, scheme="duplicate", group_size=3)
    plans = [Plan.data_parallel(graph, 3), Plan.hybrid(graph, 3), duplicate]
    if "attention" in {layer.name for layer in graph.layers}:
        plans.append(plans[0].with_layer("attention", scheme="shard_heads", group_size=3))
    if net is drawing.Modules:
        tail = duplicate.with_layer("conv", scheme="replicate").with_layer(
            "second", scheme="shard_out", group_size=3
        )
        plans += [tail.with_rounds("B"), tail.with_rounds("B/K")]
    check(on_ranks, [Case(net, plan, rows) for plan in plans])


@pytest.mark.parametrize("net", drawing.NETS)
def test_what_is_computed_again_draws_again(on_ranks, net):
    """Gradients are those of the same plan that keeps everything, bit by bit."""
    graph, plan = GRAPHS[net], Plan.hybrid(GRAPHS[net], 2)
    able = [each.name for each in graph.layers if each.rows and not each.target.endswith("_")]
    cases = [Case(net, p, ((2, 3),)) for p in (plan, plan.with_recompute(*able))]
    assert any(graph[name].random for segment in cases[1].plan.segments for name in segment)
    for kept, again in on_ranks(2, split, cases):
        same(again.steps[0].gradients, kept.steps[0].gradients)
        assert torch.equal(again.steps[0].outputs, kept.steps[0].outputs)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("weights")
    return {
        net: initialize(GRAPHS[net], 0, folder / net.__name__, module=net().double())
        for net in drawing.NETS
    }


@pytest.mark.parametrize("net", [drawing.Functions, drawing.Attention])
def test_one_seed_gives_one_run(on_ranks, weights, net):
    """Two runs have the same bits; micro-batches change nothing but the rounding."""
    run = Experiment(plan=Plan.hybrid(GRAPHS[net], 2), **FIELDS)
    first, again = (on_ranks(2, trained, run, weights[net]) for _ in range(2))
    parts = on_ranks(2, trained, run.replace(accumulate=2), weights[net])
    for one, other, parted in zip(first, again, parts, strict=True):
        same(one[0], other[0])
        for name, tensor in one[0].items():
            torch.testing.assert_close(parted[0][name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("net", [drawing.Modules, drawing.Functions])
def test_a_run_goes_on_as_if_it_had_not_stopped(on_ranks, weights, tmp_path, net):
    """Under another plan, whose ranks draw for other rows."""

    def run(plan, resume, stop_after):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        experiment = Experiment(plan=plan, **FIELDS)
        args = (experiment, weights[net], folder, resume, stop_after)
        rows, outcomes = zip(*on_ranks.seated(plan.world_size, session, *args), strict=True)
        return [row["loss"] for row in rows[0]], outcomes[0]

    whole, _ = run(Plan.data_parallel(GRAPHS[net], 1), None, None)
    begun, stopped = run(Plan.data_parallel(GRAPHS[net], 3, (2, 0, 1)), None, 1)
    resumed, _ = run(Plan.hybrid(GRAPHS[net], 2), Path(stopped.checkpoint), None)
    assert len(resumed) == 1
    assert begun + resumed == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("net", drawing.NETS)
def test_verification_covers_what_draws(on_ranks, tmp_path, net):
    plan = Plan.hybrid(GRAPHS[net], 2)
    experiment = experiment_for(
        plan, batch_size=5, steps=2, precision="fp64", optimizer=None, data=FIELDS["data"], seed=4
    )
    found = verified(on_ranks, tmp_path, experiment, net().double(), repeat=True)
    assert found.exact, found
