"""What lies between cut layers, divided by tokens: sequence parallelism."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import workbench as wb
from tests.layers import heads
from tests.oracle.cases import graph_of
from tests.oracle.written import NORMED
from workbench.plan.placement.placement import Layout, Replicate, Shard

TOKENS, WIDTH = 6, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        root = (x * x).mean(-1, keepdim=True).rsqrt()
        return x + self.drop(self.down(torch.relu(self.up(x * root * self.own))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(11, WIDTH), nn.Parameter(torch.ones(TOKENS, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.table(x) + self.places)))


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return wb.trace(Stack(), input_shape=(TOKENS,), vocabulary=11)


@pytest.fixture(scope="module")
def plan(graph):
    plan = wb.Plan.data_parallel(graph, 2).with_layer("table", scheme="shard_in")
    for name, scheme in (("up", "shard_out"), ("down", "shard_in")):
        for index in (0, 1):
            plan = plan.with_layer(f"blocks.{index}.{name}", scheme=scheme)
    return plan.with_layer("head", scheme="shard_out").with_shard_tokens()


def crossings(plan):
    steps = [step.name for steps in plan.flow.edges.values() for step in steps]
    return {name: steps.count(name) for name in steps}


def by_tokens(plan, *sizes):
    return {name for name, at in plan.flow.inputs.items() if at == Layout(2, Shard(1, sizes))}


def test_sums_are_scattered_and_gathered_by_tokens(plan):
    assert crossings(plan) == {
        "all_gather_rows": 1,  # the tokens' ids
        "reduce_scatter_tokens": 5,
        "all_gather_tokens": 5,
    }


def test_norms_residuals_dropout_and_positions_lie_by_tokens(plan):
    found = by_tokens(plan, 3, 3)
    assert {"add", "blocks.0.norm", "blocks.0.drop", "norm"} <= found
    assert {plan.graph[name].target.rpartition(".")[2] for name in found} == {
        *("add", "LayerNorm", "Dropout", "mul", "mean", "rsqrt", "RMSNorm"),
    }


def test_their_weights_are_whole_and_summed_over_the_world(plan):
    for name in ("blocks.0.norm.weight", "blocks.1.own", "norm.weight", "places"):
        placed = plan.flow.weights[name]
        assert (placed.placement, placed.group_size) == (Replicate(), 1), name


def test_without_it_rows_are_own(plan):
    rows = plan.with_shard_tokens(False)
    assert by_tokens(rows, 3, 3) == set()
    assert crossings(rows) == {"all_gather_rows": 6, "reduce_scatter_rows": 5}


@pytest.mark.parametrize(("shares", "sizes"), [((2, 1), (4, 2)), ((0, 5), (0, 6))])
def test_tokens_may_be_unequal(plan, shares, sizes):
    assert by_tokens(plan.with_shard_tokens(shares), *sizes) == by_tokens(plan, 3, 3)


def test_equal_shares_are_no_shares(plan):
    assert plan.with_shard_tokens((2, 2)) == plan
    assert plan.with_shard_tokens((2, 1)) != plan
    assert hash(plan.with_shard_tokens((2, 2))) == hash(plan)


def test_what_is_copied_keeps_it(plan):
    for tokens in (True, (2, 1)):
        divided = plan.with_shard_tokens(tokens)
        assert wb.Plan.from_toml(divided.to_toml()) == divided
        assert divided.evaluation.shard_tokens == divided.shard_tokens
        assert by_tokens(divided.evaluation, *([3, 3] if tokens is True else [4, 2]))


def test_hybrid_takes_it(graph):
    assert wb.Plan.hybrid(graph, 2, shard_tokens=(2, 1)).shard_tokens == (2, 1)
    assert by_tokens(wb.Plan.hybrid(graph, 2, shard_tokens=True), 3, 3)


def test_it_is_told(plan):
    count = len(by_tokens(plan, 3, 3))
    assert f"tokens of {count} layers divided" in repr(plan)
    assert f"tokens 2:1 of {count} layers divided" in plan.with_shard_tokens((2, 1))._repr_html_()
    assert "all_gather_tokens" in str(plan)
    assert "tokens" not in repr(plan.with_shard_tokens(False))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ((1, 2, 3), r"3 shares \(1, 2, 3\), and layer 'table' has groups of 2 ranks"),
        ((0, 0), "not all zero"),
        ((-1, 2), "numbers >= 0"),
        ("equal", "must be True, False, or the relative tokens"),
        (2, "must be True, False, or the relative tokens"),
    ],
)
def test_what_cannot_be_is_refused(plan, tokens, reason):
    with pytest.raises(wb.PlanError, match=reason):
        plan.with_shard_tokens(tokens)


def test_torchs_words_do_not_say_it(plan):
    with pytest.raises(wb.PlanError, match="shard_tokens"):
        plan.module_plan()


def test_images_have_no_tokens():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    plan = wb.Plan.filters(wb.trace(net, input_shape=(3, 8, 8)), 2)
    assert plan.with_shard_tokens().flow == plan.flow


@pytest.mark.parametrize(
    ("tokens", "sync", "reason"),
    [
        (True, wb.LocalSGD(every=2), "'add' has some tokens.*under LocalSGD weights step before"),
        (False, wb.LocalSGD(every=2), None),
        (True, wb.Pipelined(width=2), None),
        (True, wb.ParameterServer(), None),
    ],
)
def test_weights_that_step_before_the_sum_are_refused(plan, tokens, sync, reason):
    given = dict(plan=plan.with_shard_tokens(tokens), sync=sync, data="synthetic", steps=1)
    with nullcontext() if reason is None else pytest.raises(wb.ExperimentError, match=reason):
        wb.Experiment(**given, optimizer="sgd", batch_size=4)


def test_so_are_norms_of_some_heads():
    graph = graph_of(NORMED)
    plan = wb.Plan.data_parallel(graph, 2).with_layer("m1", scheme="shard_out")
    plan = plan.with_layer("out", scheme="shard_in")
    placed = plan.flow.weights["m2.weight"]
    assert (placed.placement, placed.group_size) == (Replicate(), 1)
    with pytest.raises(wb.ExperimentError, match=r"'m2' has some heads.*scheme='replicate'"):
        wb.Experiment(
            plan=plan, sync=wb.LocalSGD(), data="synthetic", steps=1, optimizer="sgd", batch_size=4
        )


@pytest.mark.parametrize(("inner", "refused"), [("Normed", False), ("Relative", True)])
def test_so_is_what_learns_and_is_read_by_several(inner, refused):
    """What only one operation reads is summed over its group at once."""
    module = heads.made(inner)
    graph = wb.trace(module, input_shape=(heads.TOKENS,), vocabulary=heads.VOCABULARY)
    given = dict(plan=wb.Plan.hybrid(graph, 2), data="synthetic", steps=1, optimizer="sgd")
    reason = "'scaled_dot_product_attention' has some heads"
    with pytest.raises(wb.ExperimentError, match=reason) if refused else nullcontext():
        wb.Experiment(**given, sync=wb.LocalSGD(), batch_size=4)
