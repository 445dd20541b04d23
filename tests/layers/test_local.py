"""Who has something to compute in a layer."""

import pytest

from tests.plan import graphs
from workbench.layers.local import idles
from workbench.plan.plan import Plan


@pytest.mark.parametrize("scheme", ["shard_in", "shard_out"])
def test_a_rank_without_inputs_or_outputs_idles(scheme):
    graph = graphs.mlp(8, 8, 8)
    plan = Plan.data_parallel(graph, 2).with_layer(
        "fc1", scheme=scheme, group_size=2, shares=(1, 0)
    )
    assert [idles(graph["fc1"], plan.flow, rank) for rank in range(2)] == [False, True]
    assert not any(idles(graph["fc0"], plan.flow, rank) for rank in range(2))
