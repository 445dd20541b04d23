"""Layers that share weights are changed together, and refused where they cannot hold them alike."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder
from workbench.plan.errors import PlanError
from workbench.plan.graph import Graph, Weight
from workbench.plan.inputs import Input
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import ROWS, Layout
from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.plan import Plan

SHARES = (2, 0, 1)


def language(*, tied: bool = True) -> Graph:
    """A table of 12 tokens, a linear layer, and scores, which the table may give."""
    aliases = ("scores.weight",) if tied else ()
    table = Weight("table.weight", (12, 6), aliases=aliases)
    builder = Builder((4,)).add("table", "embedding", (4, 6), weights=(table,), num_embeddings=12)
    builder.linear("middle", 6)
    scores = Weight("scores.bias", (12,)), Weight("scores.weight", (12, 6))
    shared = dict(weights=scores[:1], shared="table") if tied else dict(weights=scores)
    graph = builder.add("scores", "linear", (4, 12), flops=576, **shared).graph()
    return replace(graph, inputs=(Input(graph.input_shape, vocabulary=12),))


def cut(scheme: str) -> Plan:
    return Plan.data_parallel(language(), 3).with_layer("table", scheme=scheme, shares=SHARES)


def test_a_table_by_the_vocabulary_goes_with_scores_by_their_output():
    plan = cut("shard_in")
    assert plan.layers["scores"] == LayerPlan("shard_out", 3, SHARES)
    assert plan.flow.weights["table.weight"].placement == Shard(0, (8, 0, 4))
    assert plan.flow.outputs["table"] == Layout(3, Partial())
    assert plan.flow.returned("scores") == Layout(3, Shard(2, (8, 0, 4)))


def test_a_table_by_features_goes_with_scores_by_their_input():
    plan = cut("shard_out")
    assert plan.layers["scores"] == LayerPlan("shard_in", 3, SHARES)
    assert plan.flow.weights["table.weight"].placement == Shard(1, (4, 0, 2))
    assert plan.flow.returned("scores") == ROWS


def test_either_of_them_changes_both_and_recomputation_stays():
    plan = cut("shard_in").with_recompute("table").with_layer("scores", scheme="shard_in")
    assert plan.layers["table"] == LayerPlan("shard_out", 3, recompute=True)
    whole = plan.with_layer("table", scheme="replicate")
    assert set(whole.layers.values()) == {LayerPlan(recompute=True)}
    again = plan.with_layer("table", scheme="duplicate")
    assert again.layers["scores"] == LayerPlan("duplicate", 3)
    assert again.flow.weights["table.weight"].placement == Replicate()


def test_weights_that_would_be_held_otherwise_are_refused():
    with pytest.raises(
        PlanError, match=r"'table' .* and both must hold them alike: .* S\(0: 6/6\)"
    ):
        Plan(language(), 2, {"table": LayerPlan("shard_in", 2)})
    graph = Builder((4,)).linear("fc", 4).add("again", "op", (4,), shared="fc").graph()
    with pytest.raises(PlanError, match="layer 'fc' shares its weights with 'again'"):
        Plan.data_parallel(graph, 2).with_layer("fc", scheme="shard_out")


def test_hybrid_cuts_a_table_with_its_scores_and_one_alone_by_features():
    tied, apart = (Plan.hybrid(language(tied=tied), 2).layers for tied in (True, False))
    assert tied["table"] == LayerPlan("shard_in", 2)
    assert tied["scores"] == LayerPlan("shard_out", 2)
    assert apart["table"] == LayerPlan("shard_out", 2)
