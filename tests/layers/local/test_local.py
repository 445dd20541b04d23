"""Who has something to compute in a layer."""

import pytest
import torch
from torch import nn

from tests.layers.nets import Memory
from tests.plan import graphs
from workbench.layers.cut import cut
from workbench.layers.cut_model import group_specs
from workbench.layers.local.context import BatchContext
from workbench.layers.local.idle import Idle
from workbench.layers.local.local import idles
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan


@pytest.mark.parametrize("scheme", ["shard_in", "shard_out"])
def test_a_rank_without_inputs_or_outputs_idles(scheme):
    graph = graphs.mlp(8, 8, 8)
    plan = Plan.data_parallel(graph, 2).with_layer(
        "fc1", scheme=scheme, group_size=2, shares=(1, 0)
    )
    assert [idles(graph["fc1"], plan.flow, rank) for rank in range(2)] == [False, True]
    assert not any(idles(graph["fc0"], plan.flow, rank) for rank in range(2))


def idling(world):
    """How many parts of its model idle on a rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    shares = dict(group_size=3, shares=(2, 0, 1))
    plan = Plan.data_parallel(trace(net, input_shape=(6,)), 3)
    plan = plan.with_layer("1", scheme="shard_out", **shares)
    plan = plan.with_layer("3", scheme="shard_in", **shares)
    context, groups = BatchContext(world.rank, (1, 1, 1), seed=0), world.groups(group_specs(plan))
    model = cut(plan, context, groups, Memory(net.state_dict()), device=torch.device("cpu"))
    return sum(isinstance(part, Idle) for part in model.traced.modules())


@pytest.mark.slow
def test_each_rank_idles_where_it_has_nothing_itself(on_ranks):
    assert on_ranks(3, idling) == [0, 3, 0]  # the two cut layers, and what is between them


@pytest.mark.parametrize("learns", [True, False])
def test_what_idles_is_tied_to_what_a_gradient_comes_back_to(learns):
    """Else ranks would disagree on whether a gradient is to be summed."""
    x, idle = torch.ones(2, 3, requires_grad=True), Idle(None, (0,), learns=learns)
    y = idle(x)
    assert (y.shape, y.requires_grad) == ((2, 0), learns)
    if learns:
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros(2, 3))
