"""Heterogeneous model parallelism: who computes which filters, and where ranks meet."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.graphs import Builder
from workbench.model.tracing.trace import trace
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.presets import GRAINS, in_grains
from workbench.plan.plans.plan import Plan

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def schemes(plan):
    return {name: choice.scheme for name, choice in plan.layers.items()}


def crossings(plan):
    return Counter(step.name for steps in plan.flow.edges.values() for step in steps)


@pytest.mark.parametrize(("filters", "shares"), [(60, (42, 15, 3)), (480, (336, 120, 24))])
def test_filters_are_those_of_the_paper(filters, shares):
    """Sec. 1.1: what 70, 25 and 5 % are of a layer's filters."""
    assert in_grains(filters, (70, 25, 5), 1) == shares


@given(length=st.integers(0, 600), shares=SHARES, grain=st.sampled_from([1, 4, 8, 16]))
def test_grains_add_up_and_stay_near_the_shares(length, shares, grain):
    sizes = in_grains(length, shares, grain)
    assert sum(sizes) == length
    assert all(size == 0 for size, share in zip(sizes, shares, strict=True) if share == 0)
    exact = apportion(length, shares)
    off = max(abs(a - b) for a, b in zip(sizes, exact, strict=True))
    assert off <= max(2 * grain if length >= GRAINS * grain * len(shares) else grain, 2)


def test_eight_filters_are_a_grain_unless_told_otherwise():
    graph = Builder((3, 8, 8)).conv("c", 800).linear("fc", 800).graph()
    eight = Plan.filters(graph, 2, (70, 30), grain=8)
    assert Plan.filters(graph, 2, (70, 30)) == eight != Plan.filters(graph, 2, (70, 30), grain=9)


def test_grains_are_whole_but_for_one_rest():
    assert in_grains(100, (1, 1), 8) == (52, 48)


def test_a_plain_net_alternates_with_one_reduction_for_each_pair():
    """Sec. 1.3: P before, R behind; what is between keeps the cut."""
    builder = Builder((3, 8, 8)).conv("c0", 40).same("relu0", "elementwise").conv("c1", 40)
    builder = builder.same("relu1", "elementwise").conv("c2", 80).conv("c3", 80)
    plan = Plan.filters(builder.graph(), 3, (70, 25, 5), grain=1)
    assert schemes(plan) == {
        "c0": "shard_out",
        "c1": "shard_in",
        "c2": "shard_out",
        "c3": "shard_in",
    }
    assert plan.flow.weights["c0.weight"].placement.sizes == (28, 10, 2)
    assert plan.flow.weights["c3.weight"].placement.sizes == (56, 20, 4)
    assert crossings(plan) == {"all_gather_rows": 1, "all_reduce": 1}
    assert plan.row_shares == (70, 25, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reductions"), [("vgg11", 5), ("mobilenet_v3_small", 21), ("densenet121", 58)]
)
def test_torchvision_nets_meet_once_for_each_pair(name, reductions):
    """Depthwise and excited layers, and concatenations, stay within their channels or are whole."""
    plan = Plan.filters(trace(name, input_shape=(3, 32, 32), num_classes=10), 3, (70, 25, 5))
    made = {(edge[0], steps) for edge, steps in plan.flow.edges.items() if steps}
    found = Counter(steps[0].name for _, steps in made)
    assert found["all_reduce"] == reductions
    assert found["all_to_all"] == 0
    held = [plan.parameters_of(rank) / plan.graph.parameters for rank in range(3)]
    assert held == pytest.approx([0.70, 0.25, 0.06], abs=0.02)


def test_shares_may_differ_by_layer():
    builder = Builder((3, 4, 4)).conv("a", 8).conv("b", 8).conv("c", 8)
    plan = Plan.filters(builder.graph(), 2, {"c": (1, 3), "a": (3, 1)}, grain=1)
    assert plan.layers["a"].shares == (6, 2)
    assert plan.layers["b"].shares == (6, 2)  # as its input lies
    assert plan.layers["c"].scheme == "duplicate"  # gives the result
    assert plan.row_shares is None


def test_groups_smaller_than_the_world():
    builder = Builder((3, 4, 4)).conv("a", 8).conv("b", 8)
    plan = Plan.filters(builder.graph(), 4, (3, 1), group_size=2, grain=1)
    assert plan.layers["a"].group_size == 2
    assert plan.row_shares == (3, 1, 3, 1)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_groups_are_shared_out_as_their_channels_were():
    graph = Builder((3, 4, 4)).conv("a", 16).conv("b", 16, groups=4).graph()
    plan = Plan.filters(graph, 2, {"a": (3, 1), "*": (1, 1)}, grain=1)
    assert plan.layers["a"].shares == (12, 4)
    assert plan.layers["b"].shares == (3, 1)


@pytest.mark.parametrize("shares", [(1, 1), (1, -1, 1), (0, 0, 0), (1, 1, float("nan")), 3])
def test_shares_must_be_one_number_for_each_rank(shares):
    graph = Builder((3, 4, 4)).conv("a", 8).graph()
    with pytest.raises(PlanError, match="3 numbers >= 0"):
        Plan.filters(graph, 3, shares)
    with pytest.raises(PlanError, match="3 numbers >= 0"):
        Plan.data_parallel(graph, 3).with_rows(shares if isinstance(shares, tuple) else (shares,))


def test_a_layer_with_fewer_filters_than_ranks_leaves_some_without():
    graph = Builder((3, 4, 4)).conv("a", 2).conv("b", 8).graph()
    plan = Plan.filters(graph, 4)
    assert plan.layers["a"].shares == plan.layers["b"].shares == (1, 1, 0, 0)


def test_shares_for_no_layer_are_refused():
    graph = Builder((3, 4, 4)).conv("a", 8).graph()
    with pytest.raises(
        PlanError, match="for 'b', which is no layer that can be split; there are a"
    ):
        Plan.filters(graph, 2, {"a": (1, 1), "b": (3, 1)})


def test_a_group_must_divide_the_world():
    graph = Builder((3, 4, 4)).conv("a", 8).graph()
    with pytest.raises(PlanError, match="valid are 1, 2, 4"):
        Plan.filters(graph, 4, group_size=3)


@given(world=st.integers(1, 6), count=st.integers(0, 70), data=st.data())
def test_rows_follow_their_shares(world, count, data):
    graph = Builder((3, 4, 4)).conv("a", 8).graph()
    shares = tuple(data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
    if not any(shares):
        shares = (1,) * world
    plan = Plan.data_parallel(graph, world, shares)
    assert plan.rows_of(count) == apportion(count, shares)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert hash(Plan.from_toml(plan.to_toml())) == hash(plan)
