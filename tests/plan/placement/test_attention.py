"""Attention in a plan: whole heads, and what belongs to them."""

import pytest

from tests.plan.graphs import Builder, transformer
from workbench.plan.graph.graph import Weight
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.placement import Layout, Partial, Replicate, Shard
from workbench.plan.plans.plan import Plan

GRAPH = transformer()
WHOLE = Plan.data_parallel(GRAPH, 4)


def cut(**choice):
    return WHOLE.with_layer("attention", scheme="shard_heads", **choice)


@pytest.mark.parametrize(
    ("choice", "heads"),
    [
        (dict(group_size=2), (2, 1)),
        (dict(), (1, 1, 1, 0)),
        (dict(shares=(0, 5, 0, 2)), (0, 2, 0, 1)),
        (dict(group_size=2, shares=(0, 1)), (0, 3)),
    ],
)
def test_a_rank_has_what_belongs_to_its_heads(choice, heads):
    k, rows = len(heads), tuple(4 * n for n in heads)
    owner = next(rank for rank, held in enumerate(heads) if held)
    weights = cut(**choice).flow.weights
    placed = {
        name: weights[f"attention.{name}"].placement
        for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }
    assert placed == {
        "in_proj_weight": Shard(0, rows, blocks=3),
        "in_proj_bias": Shard(0, rows, blocks=3),
        "out_proj.weight": Shard(1, rows),
        "out_proj.bias": Shard(0, tuple(12 * (rank == owner) for rank in range(k))),
    }
    assert [weights["attention.in_proj_weight"].piece_shape(rank) for rank in range(k)] == [
        (3 * n, 12) for n in rows
    ]


def test_whole_rows_come_in_and_summands_go_out():
    flow = cut(group_size=2).flow
    assert flow.inputs["attention"] == Layout(2, Replicate())
    assert flow.outputs["attention"] == Layout(2, Partial())
    (gather,), (scatter,) = flow.edges["norm", "attention"], flow.edges["attention", "drop"]
    assert (gather.name, gather.gradient) == ("all_gather_rows", "partial")
    assert scatter.name == "reduce_scatter_rows"


def test_without_a_group_it_is_whole():
    plan = cut(group_size=1)
    assert plan.flow.weights["attention.in_proj_weight"].placement == Replicate()
    assert plan.flow.edges["norm", "attention"] == ()


def test_text_and_table():
    plan = cut(group_size=2, shares=(0, 1))
    assert Plan.from_toml(plan.to_toml()) == plan
    row = next(line for line in str(plan).splitlines() if line.startswith("attention "))
    assert "0/3 heads" in row
    assert "all_gather_rows" in row
    assert "0/3 heads" in plan._repr_html_()


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (dict(scheme="shard_out"), "no scheme 'shard_out'.*'shard_heads'"),
        (dict(scheme="shard_heads", shares=(1, 2)), r"2 shares \(1, 2\) for a group of 4 ranks"),
        (dict(scheme="shard_heads", shares=(0, 0, 0, 0)), "all shares are zero"),
    ],
)
def test_errors_name_the_layer_and_what_is_valid(choice, says):
    with pytest.raises(PlanError, match=f"layer 'attention'.*{says}"):
        WHOLE.with_layer("attention", **choice)
    with pytest.raises(PlanError, match=r"layer 'fc0'.*no scheme 'shard_heads'"):
        WHOLE.with_layer("fc0", scheme="shard_heads")


def test_window_attention_with_scaled_cosines_is_cut_by_heads():
    """Swin v2 scales by head, and its position bias comes from a small network."""
    heads, e = 3, 12
    shapes = {
        "qkv.weight": (3 * e, e),
        "qkv.bias": (3 * e,),
        "proj.weight": (e, e),
        "proj.bias": (e,),
        "logit_scale": (heads, 1, 1),
        "cpb_mlp.2.weight": (heads, 8),
    }
    weights = tuple(Weight(f"attention.{name}", shape) for name, shape in shapes.items())
    graph = Builder((4, e)).same("norm", "layer_norm")
    graph = graph.add("attention", "attention", (4, e), weights=weights, heads=heads).graph()
    plan = Plan.data_parallel(graph, 2).with_layer(
        "attention", scheme="shard_heads", group_size=2, shares=(2, 1)
    )
    pieces = {
        name: [plan.flow.weights[f"attention.{name}"].piece_shape(rank) for rank in range(2)]
        for name in shapes
    }
    assert pieces == {
        "qkv.weight": [(24, 12), (12, 12)],
        "qkv.bias": [(24,), (12,)],
        "proj.weight": [(12, 8), (12, 4)],
        "proj.bias": [(12,), (0,)],
        "logit_scale": [(2, 1, 1), (1, 1, 1)],
        "cpb_mlp.2.weight": [(2, 8), (1, 8)],
    }
