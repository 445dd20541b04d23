"""What is predicted where tokens are divided, beside what was recorded and measured."""

import pytest
import torch
from torch import nn

from tests.predict import running
from tests.predict.machines import FAST, device, machine
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

TOKENS, WIDTH, VOCABULARY = 48, 64, 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        root = (x * x).mean(-1, keepdim=True).rsqrt()
        return x + self.drop(self.out(torch.tanh(self.into(x * root * self.own))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(torch.rand(TOKENS, WIDTH)),
        )
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.table(ids) + self.places)))


def made():
    torch.manual_seed(0)
    module = Stack()
    return module, trace(module, input_shape=(TOKENS,), vocabulary=VOCABULARY)


def experiment(plan, **more):
    fields = dict(data=Synthetic(samples=64, classes=VOCABULARY), batch_size=32, steps=3)
    return Experiment(plan=plan, optimizer=SGD(lr=0.01, momentum=0.9), **fields | more)


DIVIDED = [(2, True), (2, (3, 1)), (2, (0, 1)), (3, (1, 0, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tokens"), DIVIDED)
def test_traffic_is_the_recorded_one(on_ranks, tmp_path, ranks, tokens):
    module, graph = made()
    plan = Plan.hybrid(graph, ranks, shard_tokens=tokens)
    run = experiment(plan, precision="fp64", batch_size=7)
    weights = initialize(graph, 0, tmp_path, module=module)
    predicted = traffic_of(program_of(run))
    for rank, rows in enumerate(on_ranks(ranks, recorded, run, weights)):
        assert sorted(predicted.rows(rank)) == sorted(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tokens"), DIVIDED[:3])
def test_peaks_are_the_measured_ones(on_ranks, tmp_path, ranks, tokens):
    module, graph = made()
    run = experiment(Plan.hybrid(graph, ranks, shard_tokens=tokens))
    weights = initialize(graph, 0, tmp_path, module=module)
    found = on_ranks.seated(ranks, running.peak_of_a_step, run, weights)
    for rank, measured in zip(memory_of(program_of(run)).ranks, found, strict=True):
        assert rank.peak_bytes == pytest.approx(measured, rel=0.01), (rank.moment, rank.categories)


@pytest.mark.slow
def test_a_batch_of_one_row_is_divided_by_tokens():
    _, graph = made()
    fast = machine(device(bandwidth=1e9), within=FAST)
    by_rows = experiment(Plan.hybrid(graph, 2), batch_size=1)
    by_tokens = experiment(Plan.hybrid(graph, 2, shard_tokens=True), batch_size=1)
    assert predict(by_tokens, fast).step_time < predict(by_rows, fast).step_time
    found = search(graph, fast, by_rows, world_size=2)
    assert found.plan.shard_tokens
    assert found.step_time <= predict(by_tokens, fast).step_time


def test_where_all_ranks_have_rows_they_are_divided():
    _, graph = made()
    found = search(graph, machine(device()), experiment(Plan.hybrid(graph, 2)), world_size=2)
    assert not found.plan.shard_tokens
