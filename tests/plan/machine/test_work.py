"""What ranks have to do for layers: together, the layer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.graphs import Builder, mlp, transformer, vgg
from workbench.plan.machine.work import work_of, works_of
from workbench.plan.plans.plan import Plan

GRAPH = vgg()


@st.composite
def plans(draw):
    plan = Plan.data_parallel(GRAPH, 4)
    for name in ("conv", "fc0", "fc1"):
        scheme = draw(st.sampled_from(("replicate", "duplicate", "shard_out", "shard_in")))
        k = 1 if scheme == "replicate" else draw(st.sampled_from((2, 4)))
        shares = None
        if scheme.startswith("shard"):
            shares = draw(st.none() | st.tuples(*[st.integers(1, 5)] * k))
        plan = plan.with_layer(name, scheme=scheme, group_size=k, shares=shares)
    return plan


@settings(max_examples=60)
@given(plans(), st.tuples(*[st.integers(0, 9)] * 4))
def test_ranks_share_a_layer_s_operations(plan, rows):
    """Each sample is computed once, or where all members compute the same, by each of them."""
    for layer in plan.graph.layers:
        works = works_of(plan, layer, rows, "fp32")
        given = plan.flow.outputs[layer.name]
        whole = type(given.placement).__name__ == "Replicate" and given.group_size > 1
        times = given.group_size if whole else 1
        assert sum(w.flops for w in works) == pytest.approx(layer.flops * sum(rows) * times)
        assert works == tuple(work_of(plan, layer, rank, rows, "fp32") for rank in range(4))


def test_weights_add_up_to_the_model_s():
    plan = Plan.hybrid(GRAPH, 4, 2)
    for layer in plan.graph.layers:
        works = works_of(plan, layer, [3] * 4, "fp32")
        held = sum(
            plan.flow.weights[w.name].piece_numel(rank) for w in layer.weights for rank in range(4)
        )
        assert sum(w.weight_bytes for w in works) == 4 * held


def test_equal_work_has_one_key_whatever_the_layer_is_called():
    graph = mlp(6, 6, 6)
    plan = Plan.data_parallel(graph, 2)
    first, second = (work_of(plan, graph[name], 0, [3, 5], "fp32") for name in ("fc0", "fc1"))
    assert first == second
    assert first.rows == 3
    assert work_of(plan, graph["fc0"], 1, [3, 5], "fp32").key == first.key


def test_the_key_shows_the_local_shapes():
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc0", scheme="shard_out", group_size=4)
    whole, piece = (work_of(p, GRAPH["fc0"], 1, [2] * 4, "fp32") for p in (Plan(GRAPH, 4), plan))
    assert whole.key != piece.key
    assert piece.flops == pytest.approx(whole.flops)  # a quarter of the layer, four times the rows
    assert piece.rows == 4 * whole.rows
    assert piece.weight_bytes < whole.weight_bytes


def test_heads_are_shares_of_attention():
    graph = transformer()
    plan = Plan.data_parallel(graph, 2).with_layer(
        "attention", scheme="shard_heads", group_size=2, shares=(2, 1)
    )
    two, one = works_of(plan, graph["attention"], [1, 1], "fp32")
    assert two.flops == pytest.approx(2 * one.flops)
    assert two.flops + one.flops == pytest.approx(2 * graph["attention"].flops)


@pytest.mark.parametrize(("precision", "bytes"), [("fp64", 2.0), ("bf16", 0.5), ("fp16", 0.5)])
def test_bytes_follow_the_precision(precision, bytes):
    plan = Plan.data_parallel(GRAPH, 1)
    fp32, other = (work_of(plan, GRAPH["relu0"], 0, [4], p) for p in ("fp32", precision))
    assert other.bytes == bytes * fp32.bytes


def test_synchronized_norms_are_another_operation():
    """They have no fused kernel: their times say nothing of each other's."""
    graph = Builder((3, 8, 8)).conv("conv", 4).norm("norm").graph()
    local = Plan.data_parallel(graph, 2)
    keys = [
        work_of(plan, graph["norm"], 0, (2, 2), "fp32").key
        for plan in (local, local.with_batch_norm("synchronized"))
    ]
    assert ["Synchronized" in key for key in keys] == [False, True]
