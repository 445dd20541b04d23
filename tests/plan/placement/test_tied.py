"""Layers that share weights are changed together, and refused where they cannot hold them alike."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder
from workbench.plan.graph.graph import Graph, Input, Weight
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Layout, Partial, Replicate, Shard
from workbench.plan.placement.tied import read_otherwise
from workbench.plan.plans.plan import Plan
from workbench.predict.search.choices import options_of

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


def read_in_evaluation(*, folded: bool) -> Graph:
    """A norm between two layers, of which evaluation reads the weight: into a layer, or not."""
    trained = Builder((8,)).linear("first", 6).norm("norm").linear("second", 4).graph()
    there = Builder((8,)).linear("first", 6)
    held = trained["norm"].weights
    for weight in held[:-1]:
        there.add(weight.name, "parameter", weight.shape, weights=(weight,), rows=0)
        there.layers[-1] = replace(there.layers[-1], inputs=())
    if folded:
        there.add("folded", "mul", (6,), "first", "norm.weight")
    there.linear("second", 4, "folded" if folded else "first")
    return replace(trained, evaluation=there.graph())


@pytest.mark.parametrize("plan", [Plan.hybrid, Plan.filters])
def test_rules_leave_whole_what_evaluation_reads_otherwise(plan):
    graph = read_in_evaluation(folded=True)
    assert read_otherwise(graph) == {"norm": "folded"}
    made = plan(graph, 2)
    assert "first" not in made.layers
    assert made.layers["second"].group_size == 2
    assert made.evaluation.flow.weights["norm.weight"].placement == Replicate()


def test_an_own_choice_that_evaluation_cannot_read_is_refused():
    plan = Plan.data_parallel(read_in_evaluation(folded=True), 2)
    says = (
        r"layer 'norm': 'norm.weight' is cut, S\(0: 3/3\) over 2, and evaluation reads it .*whole"
    )
    with pytest.raises(PlanError, match=says):
        plan.with_layer("first", scheme="shard_out")
    assert plan.with_layer("first", scheme="duplicate").flow


def test_what_evaluation_does_not_read_may_be_cut():
    graph = read_in_evaluation(folded=False)
    assert read_otherwise(graph) == {}
    assert Plan.hybrid(graph, 2).layers["first"].scheme == "shard_out"


def test_a_search_keeps_whole_what_evaluation_reads_otherwise():
    options = options_of(read_in_evaluation(folded=True), 2, (1, 2), {}, {})
    assert options["first"] == (LayerPlan(),)
    assert len(options["second"]) > 1
