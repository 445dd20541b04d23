"""Heads of written attention, and halves of gated units, cut over ranks: all as in one process."""

import pytest

from tests.layers.heads import HEADS, INNER, TOKENS, VOCABULARY, made
from tests.train.runs import verified
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan

RANKS = 3


def traced(inner):
    return trace(made(inner), input_shape=(TOKENS,), vocabulary=VOCABULARY)


def unequal(graph):
    """Two thirds of the pieces on the first rank, none on the second."""
    plan = Plan.hybrid(graph, RANKS, RANKS)
    for name, choice in plan.layers.items():
        if graph[name].output_units and choice.scheme == "shard_out":
            plan = plan.with_layer(name, scheme="shard_out", group_size=RANKS, shares=(2, 0, 1))
    return plan


PLANS = {
    "hybrid": lambda graph: Plan.hybrid(graph, RANKS, RANKS),
    "unequal": unequal,
    "recomputed": lambda graph: unequal(graph).with_recompute("inner*"),
    "filters": lambda graph: Plan.filters(graph, RANKS, shares=(3, 0, 2)),
    "first cut alone": lambda graph: Plan.data_parallel(graph, RANKS, (1, 2, 1)).with_layer(
        next(one.name for one in graph.layers if one.output_units),
        scheme="shard_out",
        group_size=RANKS,
    ),
}


@pytest.mark.parametrize("inner", INNER)
def test_a_hybrid_plan_gathers_nothing_inside(inner):
    graph = traced(inner)
    plan = Plan.hybrid(graph, RANKS, RANKS)
    inside = [one.name for one in graph.layers if one.name in plan.flow.ways]
    assert inside
    for (name, reader), steps in plan.flow.edges.items():
        if (name in inside or reader in inside) and name != "expand":  # of sinks, to their heads
            assert not steps or graph[name].rows == 0, (name, reader)
    for name, choice in plan.layers.items():
        if name.startswith("inner"):
            assert choice.scheme == ("shard_in" if name[-2:] in (".o", "wn") else "shard_out")


def test_a_rank_has_whole_heads_of_query_key_and_value():
    plan = unequal(traced("Fused"))
    assert plan.flow.weights["inner.qkv.weight"].placement == Shard(0, (16, 0, 8), 3)
    assert plan.flow.weights["inner.o.weight"].placement == Shard(1, (16, 0, 8))
    grouped = unequal(traced("Grouped"))  # two heads of keys, each with three of queries
    assert grouped.flow.weights["inner.q.weight"].placement == Shard(0, (12, 0, 12))
    assert grouped.flow.weights["inner.k.weight"].placement == Shard(0, (4, 0, 4))


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", PLANS)
def test_all_is_as_in_one_process(on_ranks, tmp_path, inner, kind):
    graph = traced(inner)
    data = Synthetic(samples=14, classes=VOCABULARY)
    run = Experiment(
        plan=PLANS[kind](graph),
        data=data,
        batch_size=7,
        optimizer=SGD(lr=0.1),
        steps=2,
        precision="fp64",
    )
    found = verified(on_ranks, tmp_path, run, made(inner))
    assert found.exact, found


def test_units_are_heads():
    graph = traced("Separate")
    assert [graph[f"inner.{one}"].output_units for one in "qkv"] == [HEADS] * 3
    assert graph["inner.o"].input_units == HEADS
    assert graph["head"].output_units == 0
