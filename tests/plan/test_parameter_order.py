"""Parameters stand in the order of the modules that hold them, not in that of execution."""

from dataclasses import replace

from tests.plan.graphs import Builder
from workbench.plan.graph.graph import Weight


def test_parameters_of_a_module_stand_together():
    builder = Builder((4,)).linear("body.first", 4).linear("head", 4)
    graph = builder.linear("body.inner.second", 4).linear("body.third", 4).graph()
    assert graph.trainable == (
        "body.first.weight",
        "body.first.bias",
        "body.inner.second.weight",
        "body.inner.second.bias",
        "body.third.weight",
        "body.third.bias",
        "head.weight",
        "head.bias",
    )


def test_a_module_s_own_parameters_stand_before_its_children_s():
    builder = Builder((4,)).linear("block.fc", 4)
    graph = builder.add("block", "op", (4,), weights=(Weight("block.scale", (4,)),)).graph()
    assert graph.trainable == ("block.scale", "block.fc.weight", "block.fc.bias")


def test_buffers_are_none():
    graph = Builder((3, 4, 4)).norm("norm").linear("fc", 2).graph()
    assert graph.trainable == ("norm.weight", "fc.weight", "fc.bias")


def test_a_tied_weight_stands_where_it_comes_first():
    graph = Builder((4,)).linear("a", 4).linear("b", 4).linear("c", 4).graph()
    a, b, c = graph.layers
    weight, bias = c.weights
    tied = replace(
        graph,
        layers=(
            replace(a, weights=a.weights[1:]),
            b,
            replace(c, weights=(replace(weight, aliases=("a.weight",)), bias)),
        ),
    )
    assert tied.trainable == ("c.weight", "a.bias", "b.weight", "b.bias", "c.bias")
