"""Running statistics of ranks that see unequal parts of the rows, or none, against plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.train.runs import started
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Input
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.step.loss import average_statistics

# The convolution stays what it is, so that what the norm reads is known in every step.
STILL = SGD(lr=1e-30)
FIELDS = dict(data=Synthetic(samples=21, classes=5), batch_size=8, optimizer=STILL, steps=5)
NAMES = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def net(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


GRAPH = trace(net(), input_shape=(3, 4, 4))
CUT = Plan.data_parallel(GRAPH, 4, (3, 1, 1, 0)).with_layer("0", scheme="shard_out", group_size=2)
PLANS = {
    "no rows on two": Plan.data_parallel(GRAPH, 3, (1, 0, 0)),
    "2:1:0": Plan.data_parallel(GRAPH, 3, (2, 1, 0)),
    "equal": Plan.data_parallel(GRAPH, 3),
    "recomputed": Plan.data_parallel(GRAPH, 3, (2, 1, 0)).with_recompute("*"),
    "channels cut": CUT.with_layer("0", shares=(3, 1)),
    "a rank without channels": CUT.with_layer("0", shares=(0, 1)),
    "whole in groups": CUT.with_layer("0", scheme="duplicate", group_size=2),
    "one group": CUT.with_layer("0", group_size=4),
}


def experiment(plan, **fields):
    return Experiment(plan=plan, precision="fp64", **{**FIELDS, **fields})


def statistics(world, run, weights):
    """This rank's pieces after all steps, made one after the last, and after every one."""
    groups = world.groups(group_specs_of(run.plan))
    return [trained(RankState.start(run, world, groups, weights, None), n) for n in (100, 1)]


def trained(state, every):
    run = state.experiment
    for step in range(run.steps):
        state.stepper.run(step)
        state.stepper.update()
        if (step + 1) % every == 0 or step + 1 == run.steps:
            average_statistics(state.model)
    pieces = state.model.pieces()
    return {name: pieces[name].clone() for name in NAMES}


def plain(run, module):
    """What one process keeps that normalizes the parts of every batch by themselves."""
    convolution, norm = module.double()[:2]
    k = run.plan.flow.inputs["1"].group_size
    data = open_data(run.data, (Input((3, 4, 4)),), 5, "train")
    mean, var, count = torch.zeros(4).double(), torch.ones(4).double(), 0
    for step in range(run.steps):
        order = rows_of_step(len(data), run.batch_size, run.seed, step)
        for batch in order.tensor_split(run.accumulate):
            rows = run.plan.rows_of(len(batch))
            sizes = [sum(rows[first : first + k]) for first in range(0, len(rows), k)]
            count += 1
            m = 1 / count if norm.momentum is None else norm.momentum
            seen = convolution(data.batch(batch)[0].double()).detach()
            parts = [part for part in seen.split(sizes) if len(part)]
            weights = [len(part) / len(batch) for part in parts]
            means = [part.mean((0, 2, 3)) for part in parts]
            variances = [part.var((0, 2, 3), unbiased=True) for part in parts]
            mean = (1 - m) * mean + m * sum(w * s for w, s in zip(weights, means, strict=True))
            var = (1 - m) * var + m * sum(w * s for w, s in zip(weights, variances, strict=True))
    return dict(zip(NAMES, (mean, var, torch.tensor(count)), strict=True))


@pytest.mark.parametrize(
    ("name", "fields", "momentum"),
    [
        *((name, {}, 0.1) for name in PLANS),
        ("2:1:0", dict(accumulate=2), 0.1),
        ("2:1:0", {}, None),
        ("no rows on two", {}, 1.0),
        ("channels cut", dict(accumulate=2), None),
    ],
)
def test_statistics_are_those_of_one_process(on_ranks, tmp_path, name, fields, momentum):
    """However often they are asked for; the batches have 8, 8 and 5 rows, so that parts change."""
    module, plan = net(momentum), PLANS[name]
    graph = trace(module, input_shape=(3, 4, 4))
    run = experiment(replace(plan, graph=graph), **fields)
    weights = initialize(graph, 0, tmp_path, module=module)
    expected = plain(run, module)
    for rank, found in enumerate(on_ranks(plan.world_size, statistics, run, weights)):
        for pieces in found:
            for each, whole in expected.items():
                placed = plan.flow.weights[each]
                if isinstance(placed.placement, Shard):
                    whole = whole.narrow(0, *placed.placement.span(rank % placed.group_size))
                assert_close(pieces[each], whole, rtol=1e-12, atol=1e-12, msg=f"{each}, {rank}")


def test_equal_parts_are_torchs_own_to_the_bit(on_ranks, tmp_path):
    """Before they are made one: what a rank of its own would keep of its rows."""
    run = experiment(Plan.data_parallel(GRAPH, 2), steps=2)
    weights = initialize(GRAPH, 0, tmp_path, module=net())
    module, data = net().double(), open_data(run.data, (Input((3, 4, 4)),), 5, "train")
    for rank, found in enumerate(on_ranks(2, unaveraged, run, weights)):
        twin = nn.BatchNorm2d(4).double()
        for step in range(run.steps):
            order = rows_of_step(len(data), run.batch_size, run.seed, step)
            twin(module[0](data.batch(order[4 * rank : 4 * rank + 4])[0].double()))
        assert_close(found, twin.running_var, rtol=0, atol=0)


def unaveraged(world, run, weights):
    state = started(world, run, weights)
    for step in range(run.steps):
        state.stepper.run(step)
    return state.model.pieces()["1.running_var"].clone()


def test_what_has_seen_nothing_stays(on_ranks, tmp_path):
    """Neither twice in a row, nor before the first step, is anything sent or moved."""
    run = experiment(Plan.data_parallel(GRAPH, 3, (1, 0, 0)), steps=1)
    weights = initialize(GRAPH, 0, tmp_path, module=net())
    for before, after, once, twice in on_ranks(3, asked_twice, run, weights):
        assert (before, twice) == ((0, True), (once[0], True))
        assert once[0] == after


def asked_twice(world, run, weights):
    state = started(world, run, weights)

    def asked():
        before = state.model.pieces()["1.running_mean"].clone()
        average_statistics(state.model)
        same = torch.equal(before, state.model.pieces()["1.running_mean"])
        sent = sum(r.messages for r in world.recorder.rows() if r.layer == "statistics")
        return sent, same

    before = asked()
    state.stepper.run(0)
    once = asked()
    return before, once[0], once, asked()


def test_evaluation_is_not_seen(on_ranks, tmp_path):
    run = experiment(Plan.data_parallel(GRAPH, 3, (2, 1, 0)), steps=1)
    weights = initialize(GRAPH, 0, tmp_path, module=net())
    for share in on_ranks(3, share_after_evaluation, run, weights):
        assert share is None


def share_after_evaluation(world, run, weights):
    state = started(world, run, weights)
    state.model.eval()
    with torch.inference_mode():
        state.model.context.set((2, 1, 0))
        state.model(torch.zeros((2, 1, 0)[world.rank], 3, 4, 4).double())
    return state.model.traced.get_submodule("1").share.value
