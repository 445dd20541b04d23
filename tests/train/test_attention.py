"""Attention cut by heads, unequal and none at all, against torch's and torchvision's own."""

import pytest

from tests.layers import nets
from tests.train.exact import Case, check
from workbench.plan.plans.plan import Plan

ATTENTION = {nets.Attending: "attention", nets.Windows: "attend", nets.WindowsV2: "attend"}
GRAPHS = nets.Graphs()


@pytest.mark.slow
@pytest.mark.parametrize("net", ATTENTION)
def test_one_gather_and_one_sum_each_way(on_ranks, net):
    """Rows are gathered, outputs are summed back to rows; the backward pass is the dual."""
    name, plan = ATTENTION[net], Plan.data_parallel(GRAPHS[net], 3)
    cases = [
        Case(net, plan.with_layer(name, scheme="shard_heads", shares=shares), ((2, 1, 2),))
        for shares in (None, (2, 1, 0), (0, 0, 5))
    ]
    back_up = plan.graph.consumers[name][0]
    weights = [("all_reduce", name, "backward")] if net is nets.WindowsV2 else []
    for ranks in check(on_ranks, cases):
        for found in ranks:
            traffic = [(op, at, way) for op, at, way, *_ in found.traffic if at != "gradients"]
            assert traffic == [
                ("all_gather", name, "forward"),
                ("reduce_scatter", back_up, "forward"),
                ("all_gather", back_up, "backward"),
                *weights,  # of the small net that gives biases to all heads
                ("reduce_scatter", name, "backward"),
            ]
