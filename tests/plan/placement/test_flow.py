"""Where conversions stand, which they are, and where weights lie."""

import pytest

from tests.plan.graphs import Builder, mlp, vgg
from workbench.plan.placement.placement import ROWS, Layout, Partial, Replicate, Shard
from workbench.plan.plans.plan import Plan

R2 = Layout(2, Replicate())


def crossings(plan):
    """(producer, reader): names of the conversions between, where there are any."""
    edges = {edge: [step.name for step in steps] for edge, steps in plan.flow.edges.items()}
    return {edge: names for edge, names in edges.items() if names}


def gradients(plan):
    return {edge: [s.gradient for s in steps] for edge, steps in plan.flow.edges.items() if steps}


def split(graph, world_size=2, **schemes):
    plan = Plan.data_parallel(graph, world_size)
    for name, scheme in schemes.items():
        plan = plan.with_layer(name, scheme=scheme, group_size=2)
    return plan


def test_data_parallel_converts_nothing():
    plan = Plan.data_parallel(vgg(), 4)
    assert crossings(plan) == {}
    assert set(plan.flow.outputs.values()) == {ROWS}


def test_a_column_row_pair_has_one_reduction_and_no_gather_between():
    plan = split(mlp(8, 6, 4, 3), fc0="shard_out", fc1="shard_in", fc2="duplicate")
    assert crossings(plan) == {
        ("input", "fc0"): ["all_gather_rows"],
        ("fc1", "relu1"): ["all_reduce"],
    }
    assert plan.flow.outputs["fc1"] == Layout(2, Partial())


def test_a_pair_before_own_rows_scatters_its_reduction():
    plan = split(mlp(8, 6, 4, 3), fc0="shard_out", fc1="shard_in")
    assert crossings(plan)["fc1", "relu1"] == ["reduce_scatter_rows"]


def test_rows_are_gathered_where_their_tensor_is_smallest():
    plan = Plan.hybrid(vgg(), 4, 4)
    assert crossings(plan) == {
        ("pool", "avgpool"): ["all_gather_rows"],
        ("fc1", "relu1"): ["all_reduce"],
    }
    # Summands of the gradient pass up through pool and flatten, to be summed where they are few.
    assert gradients(plan) == {("pool", "avgpool"): ["partial"], ("fc1", "relu1"): ["partial"]}


def test_unlike_readers_of_one_value_share_the_gather_but_not_the_sum():
    builder = Builder((8,)).linear("fc0", 8).linear("cut", 8).same("relu", "elementwise")
    builder.linear("whole", 8, "fc0").same("sum", "add", "relu", "whole")
    plan = split(builder.graph(), cut="shard_out", whole="duplicate")
    gather, copy = plan.flow.edges["fc0", "cut"]
    assert (gather.name, gather.gradient) == ("all_gather_rows", "same")
    assert (copy.name, copy.gradient) == ("copy_to", "partial")
    assert plan.flow.edges["fc0", "whole"] == (gather,)


def test_a_residual_block_cut_by_filters_reduces_once_each_way():
    builder = Builder((4, 5, 5)).conv("stem", 8).conv("a", 8).norm("bn").same("relu", "elementwise")
    builder.conv("b", 8).same("add", "add", "b", "stem").same("out", "elementwise")
    builder.conv("head", 4)
    graph = builder.graph()
    plan = split(graph, stem="duplicate", a="shard_out", b="shard_in", head="duplicate")
    assert crossings(plan) == {
        ("input", "stem"): ["all_gather_rows"],
        ("stem", "a"): ["copy_to"],
        ("b", "add"): ["all_reduce"],
    }
    assert plan.flow.inputs["bn"] == Layout(2, Shard(1, (4, 4)))
    assert plan.flow.weights["bn.running_mean"].placement == Shard(0, (4, 4))
    assert plan.flow.weights["bn.num_batches_tracked"].placement == Replicate()


def test_a_depthwise_convolution_stays_within_its_channels():
    builder = Builder((4, 5, 5)).conv("expand", 6).conv("depth", 6, groups=6).conv("project", 4)
    plan = split(builder.graph(), expand="shard_out", depth="shard_out", project="shard_in")
    assert crossings(plan) == {("input", "expand"): ["all_gather_rows"]}
    assert plan.flow.returns["project"][0].name == "reduce_scatter_rows"


def test_unknown_operations_get_whole_rows():
    builder = Builder((4, 6)).linear("fc0", 8).same("mystery", "op").linear("fc1", 3)
    plan = split(builder.graph(), fc0="shard_out", fc1="shard_out")
    assert plan.flow.inputs["mystery"] == ROWS
    assert crossings(plan)["fc0", "mystery"] == ["all_to_all"]


def test_other_group_sizes_meet_over_own_rows():
    plan = split(mlp(8, 6, 4), world_size=4, fc0="shard_out")
    plan = plan.with_layer("fc1", scheme="shard_out", group_size=4)
    assert crossings(plan)["relu0", "fc1"] == ["all_to_all", "all_gather_rows"]


def test_flatten_is_channel_major():
    builder = Builder((3, 4, 4)).conv("conv", 5).add("flat", "flatten", (80,)).linear("fc", 7)
    plan = split(builder.graph(), conv="shard_out", fc="shard_in")
    assert plan.flow.inputs["fc"].placement == Shard(1, (48, 32))
    assert plan.flow.weights["fc.weight"].placement == Shard(1, (48, 32))


def test_a_bias_behind_a_reduction_is_added_by_one_rank():
    plan = split(mlp(8, 6, 4), fc0="shard_out").with_layer(
        "fc1", scheme="shard_in", group_size=2, shares=(0, 1)
    )
    assert plan.flow.weights["fc1.weight"].placement == Shard(1, (0, 6))
    assert plan.flow.weights["fc1.bias"].placement == Shard(0, (0, 4))


@pytest.mark.parametrize("scheme", ["shard_out", "shard_in", "duplicate"])
def test_a_group_of_one_is_data_parallel(scheme):
    plan = Plan.data_parallel(mlp(8, 6, 4), 2).with_layer("fc0", scheme=scheme, group_size=1)
    assert crossings(plan) == {}
    assert plan.flow.weights["fc0.weight"].placement == Replicate()


def test_pieces_add_up_to_the_whole():
    plan = Plan.hybrid(vgg(), 4, 4)
    for name in ("fc0.weight", "fc1.weight", "fc2.bias"):
        placed = plan.flow.weights[name]
        whole = 1
        for length in placed.shape:
            whole *= length
        assert sum(placed.piece_numel(rank) for rank in range(4)) == whole
