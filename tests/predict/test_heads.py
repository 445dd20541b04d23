"""What is predicted where attention is cut by heads, beside what was recorded and measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.heads import INNER, TOKENS, VOCABULARY, made
from tests.predict import running
from tests.predict.machines import device, machine
from tests.predict.test_several_inputs import recorded
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.memory import memory_of
from workbench.predict.prediction import predict
from workbench.predict.search import search
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of

PLANS = {
    "hybrid": lambda graph: Plan.hybrid(graph, 2, 2),
    "filters": lambda graph: Plan.filters(graph, 2, shares=(2, 1)),
}


def experiment(plan, **more):
    fields = dict(data=Synthetic(samples=64, classes=VOCABULARY), batch_size=7, steps=3)
    return Experiment(plan=plan, optimizer=SGD(lr=0.01, momentum=0.9), **fields | more)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("plan", PLANS)
def test_traffic_is_the_recorded_one(on_ranks, tmp_path, inner, plan):
    module = made(inner)
    graph = trace(module, input_shape=(TOKENS,), vocabulary=VOCABULARY)
    run = experiment(PLANS[plan](graph), precision="fp64")
    weights = initialize(graph, 0, tmp_path, module=module)
    predicted = traffic_of(program_of(run))
    for rank, rows in enumerate(on_ranks(2, recorded, run, weights)):
        assert sorted(predicted.rows(rank)) == sorted(rows)


class Block(nn.Module):
    """A block of attention and a gated unit, of 64 tokens and 128 features.

    Args:
        what: what is done to the heads of the query: "nothing"; "normed"; or "joined" from two
            halves, whose memory has another order, so that what is attended has to be copied.
    """

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.scale = nn.Parameter(torch.ones(16)) if what == "normed" else None
        self.table, self.norm = nn.Embedding(200, 128), nn.LayerNorm(128)
        self.qkv, self.o = nn.Linear(128, 384), nn.Linear(128, 128)
        self.both, self.down, self.head = (
            nn.Linear(128, 512),
            nn.Linear(256, 128),
            nn.Linear(128, 200),
        )

    def forward(self, ids):
        x = self.table(ids)
        b, t, c = x.shape
        parts = self.qkv(self.norm(x)).split(c, 2)
        q, k, v = (part.view(b, t, 8, 16).transpose(1, 2) for part in parts)
        if self.scale is not None:
            q = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale
        if self.what == "joined":
            q = torch.cat((q[..., 8:], q[..., :8]), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).contiguous().reshape(b, t, c).to(x.dtype))
        gate, up = self.both(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("what", ["nothing", "normed", "joined"])
def test_peaks_are_the_measured_ones(on_ranks, tmp_path, plan, what):
    torch.manual_seed(0)
    module = Block(what)
    graph = trace(module, input_shape=(64,), vocabulary=200)
    run = experiment(PLANS[plan](graph), data=Synthetic(samples=64, classes=200), batch_size=32)
    weights = initialize(graph, 0, tmp_path, module=module)
    found = on_ranks.seated(2, running.peak_of_a_step, run, weights)
    for rank, measured in zip(memory_of(program_of(run)).ranks, found, strict=True):
        assert rank.peak_bytes == pytest.approx(measured, rel=0.01), (rank.moment, rank.categories)


class Chosen(nn.Module):
    """Of two wide values and a mask, what reads them saves the mask alone."""

    def __init__(self):
        super().__init__()
        self.table, self.up = nn.Embedding(200, 32), nn.Linear(32, 2048)
        self.down = nn.Linear(2048, 200)

    def forward(self, ids):
        x = self.up(self.table(ids))
        return self.down(torch.where(x.detach() > 0, x, 0.1 * x))


class Stretched(Chosen):
    """A parameter is broadcast: its gradient is as large as the activations before it is summed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2048))

    def forward(self, ids):
        return self.down(self.up(self.table(ids)) * self.scale)


class Cubed(torch.autograd.Function):
    """A function of one's own, which makes what nobody sees, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 0.1 * (x * x) * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + 0.3 * x * x) + 0 * (x + 1) * (x - 1)


class Activation(nn.Module):
    def forward(self, x):
        return Cubed.apply(x)


class Foreign(Chosen):
    """As Bloom's, whose GELU is such a function."""

    def __init__(self):
        super().__init__()
        self.activation = Activation()

    def forward(self, ids):
        return self.down(self.activation(self.up(self.table(ids))))


@pytest.mark.slow
@pytest.mark.parametrize("net", [Chosen, Stretched, Foreign])
def test_of_what_is_read_only_what_is_saved_is_kept(on_ranks, tmp_path, net):
    torch.manual_seed(0)
    module = net()
    graph = trace(module, input_shape=(64,), vocabulary=200)
    plan, data = Plan.data_parallel(graph, 2), Synthetic(samples=64, classes=200)
    run = experiment(plan, data=data, batch_size=32)
    weights = initialize(graph, 0, tmp_path, module=module)
    found = on_ranks.seated(2, running.peak_of_a_step, run, weights)
    for rank, measured in zip(memory_of(program_of(run)).ranks, found, strict=True):
        assert rank.peak_bytes == pytest.approx(measured, rel=0.01), (rank.moment, rank.categories)


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
def test_a_search_says_what_a_prediction_says(inner):
    graph = trace(made(inner), input_shape=(TOKENS,), vocabulary=VOCABULARY)
    own, presets = machine(device()), (Plan.data_parallel(graph, 2), PLANS["hybrid"](graph))
    runs = [experiment(plan, batch_size=8) for plan in presets]
    found = search(graph, own, runs[0], world_size=2)
    best = predict(experiment(found.plan, batch_size=8), own)
    assert found.step_time == pytest.approx(best.step_time, rel=1e-9)
    for run in runs:
        assert found.step_time <= predict(run, own).step_time * (1 + 1e-9)
