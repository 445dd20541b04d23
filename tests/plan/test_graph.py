"""Layers that compute alike."""

from dataclasses import replace

from tests.plan.graphs import mlp


def test_layers_alike_have_one_number():
    alike = mlp(8, 8, 8, 8).alike
    assert alike["fc0"] == alike["fc1"] == alike["fc2"]
    assert alike["fc0"] != alike["relu0"]


def test_other_shapes_or_frozen_weights_are_not_alike():
    graph = mlp(8, 8, 6)
    assert graph.alike["fc0"] != graph.alike["fc1"]
    first, *rest = mlp(8, 8, 8).layers
    frozen = replace(first, weights=tuple(replace(w, trainable=False) for w in first.weights))
    other = replace(graph, layers=(frozen, *rest))
    assert other.alike["fc0"] != other.alike["fc1"]
