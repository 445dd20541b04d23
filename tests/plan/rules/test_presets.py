"""The rule of hybrid plans, and how a plan says what it cut, what not, and why."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder, mlp, transformer, vgg
from workbench.plan.graph.graph import Graph, Input, Weight
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.presets import layer_decisions
from workbench.plan.plans.plan import Plan

BLOCK = Plan.hybrid(transformer(), 4, 2)


def with_flops(graph: Graph, **flops: int) -> Graph:
    layers = (replace(layer, flops=flops.get(layer.name, 0)) for layer in graph.layers)
    return replace(graph, layers=tuple(layers))


def test_a_transformer_is_cut_by_heads_and_in_pairs():
    assert BLOCK.layers == {
        "embed": LayerPlan("shard_out", 2),
        "attention": LayerPlan("shard_heads", 2),
        "fc0": LayerPlan("shard_out", 2),
        "fc1": LayerPlan("shard_in", 2),
        "head": LayerPlan("shard_out", 2),
    }


@pytest.mark.parametrize(("flops", "reason"), [(1, "cut"), (60, "cut"), (61, "light")])
def test_a_layer_is_light_whose_flops_outweigh_its_parameters(flops, reason):
    """A quarter of the parameters, and of the FLOPs up to a half or more."""
    graph = with_flops(mlp(10, 10, 10, 10, 10), fc0=flops, fc1=20, fc2=20, fc3=20)
    assert [decision.reason for decision in layer_decisions(graph)] == [reason, "cut", "cut", "cut"]


def test_the_reasons_for_each_verdict():
    found = {decision.layer.name: decision for decision in layer_decisions(mlp(100, 400, 400, 2))}
    assert {name: decision.reason for name, decision in found.items()} == {
        "fc0": "cut",
        "fc1": "cut",
        "fc2": "small",
    }
    assert sum(decision.parameters for decision in found.values()) == pytest.approx(1)
    assert {decision.reason for decision in layer_decisions(vgg())} == {"convolution", "cut"}


def test_a_plan_says_what_it_cut_and_why():
    graph = with_flops(vgg(), conv=900, fc0=60, fc1=30, fc2=10)
    plan = Plan.hybrid(graph, 4, 2)
    for shown in (repr(plan), str(plan)):
        assert (
            "Rule: convolutions stay whole; a linear, embedding or attention layer is cut that"
            in shown
        )
        assert "cut: 3 linear, 99.2% of the parameters, 10.0% of the FLOPs (fc0, fc1, fc2)" in shown
        assert "whole, convolutions: 1 conv2d, 0.8% of the parameters, 90.0%" in shown
    assert "whole, convolutions: 1 conv2d" in plan._repr_html_()


def test_what_a_person_changed_is_said():
    plan = BLOCK.with_layer("attention", shares=(2, 1)).with_layer("head", scheme="replicate")
    lines = repr(plan).splitlines()
    assert lines[-2:] == [
        "  otherwise: attention is shard_heads/2 by 2/1; by the rule shard_heads/2",
        "  otherwise: head is replicate; by the rule shard_out/2",
    ]


def test_other_plans_have_no_such_reasons():
    graph = transformer()
    by_hand = Plan.data_parallel(graph, 4).with_layer("fc0", scheme="duplicate")
    for plan in (Plan.data_parallel(graph, 4), by_hand):
        assert "Rule" not in repr(plan)
        assert len(repr(plan).splitlines()) == 1


def test_reasons_are_no_part_of_the_value():
    assert Plan.from_toml(BLOCK.to_toml()) == BLOCK
    assert "Rule" not in BLOCK.to_toml()
    assert repr(Plan.from_toml(BLOCK.to_toml())) == repr(BLOCK)


def test_shared_weights_are_named():
    builder = Builder((6,)).linear("twice", 6).same("relu", "elementwise")
    builder.add("twice@2", "linear", (6,), shared="twice").linear("last", 3)
    assert [(v.layer.name, v.reason) for v in layer_decisions(builder.graph())] == [
        ("twice", "shared"),
        ("last", "cut"),
    ]


def test_a_table_is_as_heavy_as_all_that_use_it():
    table = Weight("table.weight", (12, 6), aliases=("first.weight", "second.weight"))
    builder = Builder((4,)).add("table", "embedding", (4, 6), weights=(table,), num_embeddings=12)
    builder.add("first", "linear", (4, 12), flops=576, shared="table").linear("back", 6)
    builder.add("second", "linear", (4, 12), flops=576, shared="table")
    graph = builder.graph()
    graph = replace(graph, inputs=(Input(graph.input_shape, vocabulary=12),))
    (found,) = [one for one in layer_decisions(graph) if one.layer.name == "table"]
    assert found.flops == (576 + 576) / graph.flops
