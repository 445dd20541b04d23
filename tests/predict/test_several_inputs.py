"""What is predicted for models that read several inputs, beside what was measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.layers.several import NETS
from tests.predict import running
from tests.predict.machines import device, machine
from workbench.comm.groups.world import World
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Input
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.memory import memory_of
from workbench.predict.prediction import predict
from workbench.predict.search import search
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of
from workbench.train.run.loop import agree
from workbench.train.run.rank import RankState, everyone, group_specs_of

INPUTS = {
    "ids": Input((32,), vocabulary=100),
    "positions": Input((32,), vocabulary=32),
    "mask": Input((32,), "bool"),
}
PLANS = {
    "rows": lambda graph: Plan.data_parallel(graph, 2, (2, 1)),
    "hybrid": lambda graph: Plan.hybrid(graph, 2, 2),
    "filters": lambda graph: Plan.filters(graph, 2, shares=(2, 1)),
}


class Block(nn.Module):
    """One block of attention over the tokens of a mask, and an MLP, with positions.

    Args:
        fused: whether the attention is torch's own operation.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.tokens, self.places = nn.Embedding(100, 64), nn.Embedding(32, 64)
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 100)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        allowed = mask[:, None, None, :]
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~allowed, float("-inf"))
            y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


def experiment(plan, **more):
    fields = dict(data=Synthetic(samples=128, classes=3), batch_size=32, steps=3)
    return Experiment(plan=plan, optimizer=SGD(lr=0.01, momentum=0.9), **fields | more)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["written", "fused"])
@pytest.mark.parametrize("plan", ["rows", "hybrid"])
def test_peaks_are_the_measured_ones(on_ranks, tmp_path, plan, fused):
    module = Block(fused=fused)
    graph = trace(module, inputs=INPUTS)
    run = experiment(PLANS[plan](graph))
    weights = initialize(graph, 0, tmp_path, module=module)
    found = on_ranks.seated(2, running.peak_of_a_step, run, weights)
    for rank, measured in zip(memory_of(program_of(run)).ranks, found, strict=True):
        assert rank.peak_bytes == pytest.approx(measured, rel=0.02), (rank.moment, rank.categories)


def recorded(world: World, run, weights):
    """The traffic of one step, as this rank recorded it."""
    groups = world.groups(group_specs_of(run.plan))
    state = RankState.start(run, world, groups, weights, None)
    world.recorder.reset()
    state.stepper.run(0)
    agree(everyone(groups, run.plan), 0.0, False, 0.0)
    state.stepper.update()
    state.strategy.rest()
    return [row.counts for row in world.recorder.rows()]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("plan", PLANS)
def test_traffic_is_the_recorded_one(on_ranks, tmp_path, net, plan):
    torch.manual_seed(0)
    module = net()
    graph = trace(module, inputs=net.INPUTS)
    data = Synthetic(samples=14, classes=net.CLASSES)
    run = experiment(PLANS[plan](graph), data=data, batch_size=7, precision="fp64")
    weights = initialize(graph, 0, tmp_path, module=module)
    predicted = traffic_of(program_of(run))
    for rank, rows in enumerate(on_ranks(2, recorded, run, weights)):
        assert sorted(predicted.rows(rank)) == sorted(rows)


@pytest.mark.parametrize("net", NETS)
def test_a_search_finds_a_plan_no_slower_than_the_presets(net):
    graph = trace(net(), inputs=net.INPUTS)
    own, presets = machine(device()), (Plan.data_parallel(graph, 2), PLANS["hybrid"](graph))
    runs = [experiment(plan, batch_size=8) for plan in presets]
    found = search(graph, own, runs[0], world_size=2)
    for run in runs:
        assert found.step_time <= predict(run, own).step_time * (1 + 1e-9)
