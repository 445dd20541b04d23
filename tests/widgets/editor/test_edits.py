"""Edits lead to the plan that the library's own calls lead to, or are refused in its words."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.widgets.editor.kit import residual
from workbench.plan.plans.rule import BUILT_IN
from workbench.widgets.editor.edits import edited, preset, shares_of, whole

VGG = graphs.vgg()
PLAN = wb.Plan.data_parallel(VGG, 4)
HYBRID = wb.Plan.hybrid(VGG, 4)


@pytest.mark.parametrize(
    ("plan", "field", "value", "options"),
    [
        (PLAN, "scheme", "shard_out", {"scheme": "shard_out"}),
        (HYBRID, "scheme", "duplicate", {"scheme": "duplicate"}),
        (HYBRID, "scheme", "replicate", {"scheme": "replicate"}),
        (HYBRID, "group", 2, {"group_size": 2}),
        (HYBRID, "shares", "3 1 1 1", {"shares": (3, 1, 1, 1), "group_size": 4}),
        (HYBRID, "shares", "", {"group_size": 4}),
        (HYBRID, "recompute", True, {"recompute": True}),
    ],
)
def test_one_layer_as_with_layer_does(plan, field, value, options):
    assert edited(plan, ["fc0"], field, value).plan == plan.with_layer("fc0", **options)


def test_several_layers_at_once():
    found = edited(HYBRID, ["fc0", "fc1"], "group", 2)
    assert found.plan == HYBRID.with_layer("fc0", group_size=2).with_layer("fc1", group_size=2)
    assert found.what == "group of 2 layers: 2"


def test_of_several_layers_those_that_can_are_changed():
    names = [layer.name for layer in VGG.layers]
    found = edited(PLAN, names, "scheme", "shard_out")
    assert list(found.plan.layers) == ["conv", "fc0", "fc1", "fc2"]
    assert found.notes == ("7 of 11 layers cannot have it",)
    assert all(c.recompute for c in edited(PLAN, names, "recompute", True).plan.layers.values())


@pytest.mark.parametrize(
    ("names", "field", "value", "reason"),
    [
        (["fc0"], "scheme", "shard_heads", "layer 'fc0': no scheme 'shard_heads'"),
        (["relu"], "scheme", "shard_out", "of kind 'elementwise' and follows its input"),
        (["fc0"], "group", 3, "group_size 3 does not divide world_size 4; valid are 1, 2, 4"),
        (["fc0"], "group", "four", "group_size must be a positive integer, got 'four'"),
        (["fc0"], "shares", "3 1", r"2 shares \(3, 1\) for a group of 4 ranks"),
        (["fc0"], "shares", "a b", "shares are numbers such as '3 1', got 'a b'"),
        (["fc0"], "shares", "0 0 0 0", "all shares are zero"),
        (["fc9"], "scheme", "shard_out", "no layer 'fc9'"),
        (["fc0"], "color", "red", "no field 'color'"),
        (["relu", "pool"], "scheme", "shard_out", "none of these 2 layers can have scheme"),
        (["conv", "relu"], "shares", "1 2", "choose a scheme that splits them first"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(names, field, value, reason):
    with pytest.raises(wb.PlanError, match=reason):
        edited(HYBRID, names, field, value)


def test_rounds_that_are_no_longer_possible_fall_back():
    plan = wb.Plan.hybrid(VGG, 4, rounds="B")
    found = edited(plan, ["fc1"], "group", 2)
    assert found.plan.rounds == "BK"
    assert found.notes[0].startswith("rounds 'B' became 'BK': ")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("world_size", "8", HYBRID.with_world_size(8)),
        ("rounds", "B/K", HYBRID.with_rounds("B/K")),
        ("batch_norm", "synchronized", HYBRID.with_batch_norm("synchronized")),
        ("rows", "3:1:1:1", HYBRID.with_rows((3, 1, 1, 1))),
        ("rows", "", HYBRID),
        ("tokens", "equal", HYBRID.with_shard_tokens()),
        ("tokens", "3:1:1:1", HYBRID.with_shard_tokens((3, 1, 1, 1))),
        ("tokens", " ", HYBRID),
    ],
)
def test_the_whole_plan(field, value, expected):
    assert whole(HYBRID, field, value).plan == expected


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("world_size", "6", "does not divide world_size 6"),
        ("world_size", "many", "world_size must be a positive integer"),
        ("rounds", "C", "no rounds 'C'"),
        ("rows", "1 2", "4 numbers >= 0"),
        ("tokens", "1 2", "2 shares .*has groups of 4 ranks"),
        ("tokens", "some", "shares are numbers"),
    ],
)
def test_a_whole_plan_that_cannot_be(field, value, reason):
    with pytest.raises(wb.PlanError, match=reason):
        whole(HYBRID, field, value)


def test_presets_are_the_librarys():
    graph = residual(2)
    assert preset(graph, 4, BUILT_IN, "data parallel", None).plan == wb.Plan.data_parallel(graph, 4)
    assert preset(graph, 4, BUILT_IN, "hybrid", 2).plan == wb.Plan.hybrid(graph, 4, 2)
    assert preset(graph, 4, BUILT_IN, "filters", None).plan == wb.Plan.filters(graph, 4)
    with pytest.raises(wb.PlanError, match="no rule 'best'"):
        preset(graph, 4, BUILT_IN, "best", None)


@pytest.mark.parametrize("text", ["3 1", "3, 1", "3:1", " 3;1 ", "3/1"])
def test_shares_are_read_as_people_write_them(text):
    assert shares_of(text) == (3, 1)
    assert shares_of("0.5 1") == (0.5, 1)
