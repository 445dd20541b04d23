"""Attention cut by heads, unequal and none at all, against torch's and torchvision's own."""

import pytest
from hypothesis import given, settings

from tests.layers import nets
from tests.layers.parity import EXAMPLES, check, plans
from workbench.model.trace import trace
from workbench.plan.plan import Plan

GRAPHS = {
    net: trace(net(), input_shape=net.shape)
    for net in (nets.Attending, nets.Windows, nets.WindowsV2)
}
FEWER = settings(EXAMPLES, max_examples=15)


@EXAMPLES
@given(plan_rows=plans(GRAPHS[nets.Attending]))
def test_any_plan_of_self_attention(on_ranks, plan_rows):
    check(on_ranks, nets.Attending, *plan_rows)


@FEWER
@given(plan_rows=plans(GRAPHS[nets.Windows]))
def test_any_plan_of_attention_in_windows(on_ranks, plan_rows):
    check(on_ranks, nets.Windows, *plan_rows)


@FEWER
@given(plan_rows=plans(GRAPHS[nets.WindowsV2]))
def test_any_plan_of_cosine_attention(on_ranks, plan_rows):
    check(on_ranks, nets.WindowsV2, *plan_rows)


@pytest.mark.parametrize(
    ("net", "name"),
    [(nets.Attending, "attention"), (nets.Windows, "attend"), (nets.WindowsV2, "attend")],
)
@pytest.mark.parametrize("shares", [None, (2, 1, 0), (0, 0, 5)])
def test_one_gather_and_one_sum_each_way(on_ranks, net, name, shares):
    """Rows are gathered, outputs are summed back to rows; the backward pass is the dual."""
    plan = Plan.data_parallel(GRAPHS[net], 3)
    plan = plan.with_layer(name, scheme="shard_heads", shares=shares)
    back_up = plan.graph.consumers[name][0]
    weights = [("all_reduce", name, "backward")] if net is nets.WindowsV2 else []
    for *_, traffic in check(on_ranks, net, plan, (2, 1, 2)):
        assert [(op, at, way) for op, at, way, _ in traffic if at != "gradients"] == [
            ("all_gather", name, "forward"),
            ("reduce_scatter", back_up, "forward"),
            ("all_gather", back_up, "backward"),
            *weights,  # of the small net that gives biases to all heads
            ("reduce_scatter", name, "backward"),
        ]
