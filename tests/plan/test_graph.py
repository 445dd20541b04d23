"""Layers that compute alike."""

from dataclasses import replace

import pytest

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


def test_numbers_of_what_is_alike_count_from_zero():
    assert mlp(8, 8, 6, 8, 6).alike == {
        "fc0": 0,
        "relu0": 1,
        "fc1": 2,
        "relu1": 3,
        "fc2": 4,
        "relu2": 1,
        "fc3": 2,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "op"},
        {"target": "torch.nn.Other"},
        {"input_shape": (9,)},
        {"output_shape": (9,)},
        {"rows": 2},
        {"flops": 1},
        {"groups": 2},
        {"heads": 2},
        {"weights": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_in_anything_are_not_alike(change):
    first, relu, last = mlp(8, 8, 8).layers
    other = replace(mlp(8, 8, 8), layers=(first, relu, replace(last, **change)))
    assert other.alike["fc0"] != other.alike["fc1"]
