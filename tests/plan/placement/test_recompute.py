"""Which layers are recomputed together, and which ones a pattern names."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder, mlp
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan, choose, matching, segments_of

NET = mlp(8, 8, 8, 8)  # fc0 relu0 fc1 relu1 fc2
AGAIN = LayerPlan(recompute=True)


@pytest.mark.parametrize(
    ("chosen", "apart", "segments"),
    [
        ("", "", []),
        ("fc0", "", [["fc0"]]),
        ("fc0 relu0 fc1", "", [["fc0", "relu0", "fc1"]]),
        ("fc0 fc1 relu1 fc2", "", [["fc0"], ["fc1", "relu1", "fc2"]]),
        ("fc0 relu0 fc1 relu1 fc2", "fc1 relu1 fc2", [["fc0", "relu0"], ["fc1", "relu1", "fc2"]]),
        ("fc0 relu0 fc1", "relu0", [["fc0"], ["relu0"], ["fc1"]]),
        ("fc1 relu1", "fc1 relu1 fc2", [["fc1", "relu1"]]),
        ("fc0 fc2", "fc0 relu0 fc1 relu1 fc2", [["fc0"], ["fc2"]]),
    ],
)
def test_successive_layers_are_one_segment(chosen, apart, segments):
    found = segments_of(NET, set(chosen.split()), set(apart.split()))
    assert found == tuple(map(tuple, segments))


def test_what_depends_on_no_sample_ends_no_segment():
    layers = [replace(x, rows=0) if x.name == "relu0" else x for x in NET.layers]
    graph = replace(NET, layers=tuple(layers))
    assert segments_of(graph, {"fc0", "fc1"}, set()) == (("fc0", "fc1"),)
    assert segments_of(graph, {"fc0", "relu0", "fc1"}, set()) == (("fc0", "fc1"),)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], []),
        (["relu1"], ["relu1"]),
        (["fc*"], ["fc0", "fc1", "fc2"]),
        (["relu?", "fc0"], ["relu0", "relu1", "fc0"]),
    ],
)
def test_patterns_name_layers_in_the_model_s_order(patterns, names):
    assert matching(patterns, NET) == names


def test_a_pattern_names_what_processes_samples():
    graph = Builder((8,)).linear("fc0", 8).add("fc1", "parameter", (8,), rows=0).graph()
    assert matching(["fc*"], graph) == ["fc0"]
    assert matching(["fc1"], graph) == ["fc1"]


@pytest.mark.parametrize("patterns", [["conv*"], ["fc0", "FC1"], [""]])
def test_a_pattern_that_names_nothing_is_refused(patterns):
    with pytest.raises(PlanError, match=f"no layer '{patterns[-1]}'".replace("*", r"\*")):
        matching(patterns, NET)


def test_a_choice_keeps_how_the_layer_is_split():
    split = LayerPlan("shard_out", 2)
    both = LayerPlan("shard_out", 2, recompute=True)
    given = {"fc0": split}
    assert choose(["fc0", "relu0"], given, recompute=True) == {"fc0": both, "relu0": AGAIN}
    assert given == {"fc0": split}
    assert choose(["fc0"], {"fc0": both, "fc1": AGAIN}, recompute=False) == {
        "fc0": split,
        "fc1": AGAIN,
    }


def test_the_default_choice_is_left_out():
    assert choose(["fc0", "fc1"], {"fc0": AGAIN}, recompute=False) == {}
