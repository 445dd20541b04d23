"""Split nets against whole ones: outputs, loss, every gradient, statistics; any plan."""

import pytest
from hypothesis import given

from tests.layers import nets
from tests.layers.parity import EXAMPLES, check, plans
from workbench.model.trace import trace
from workbench.plan.errors import PlanError
from workbench.plan.plan import Plan

GRAPHS = {net: trace(net(), input_shape=net.shape) for net in nets.NETS}


@EXAMPLES
@given(plan_rows=plans(GRAPHS[nets.Images]))
def test_any_plan_of_images(on_ranks, plan_rows):
    check(on_ranks, nets.Images, *plan_rows)


@EXAMPLES
@given(plan_rows=plans(GRAPHS[nets.Residual]))
def test_any_plan_of_a_residual_net(on_ranks, plan_rows):
    check(on_ranks, nets.Residual, *plan_rows)


@EXAMPLES
@given(plan_rows=plans(GRAPHS[nets.Tokens]))
def test_any_plan_of_a_transformer(on_ranks, plan_rows):
    check(on_ranks, nets.Tokens, *plan_rows)


@EXAMPLES
@given(plan_rows=plans(GRAPHS[nets.Tied]))
def test_any_plan_of_tied_weights(on_ranks, plan_rows):
    check(on_ranks, nets.Tied, *plan_rows)


def test_shared_weights_cannot_be_cut():
    plan = Plan.data_parallel(GRAPHS[nets.Tied], 2)
    for name in ("twice", "encode", "decode"):
        with pytest.raises(PlanError, match=f"layer '{name}' shares its weights"):
            plan.with_layer(name, scheme="shard_out")
