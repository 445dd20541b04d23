"""Plans as values: changes, refusals, text."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.graphs import Builder, mlp, vgg
from workbench.plan.graph.graph import Source
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan, require
from workbench.plan.plans.plan import Plan

GRAPH = vgg()
PLAN = Plan.hybrid(GRAPH, 4, 2)


def test_hybrid_cuts_linear_layers_in_pairs():
    assert {n: (c.scheme, c.group_size) for n, c in PLAN.layers.items()} == {
        "fc0": ("shard_out", 2),
        "fc1": ("shard_in", 2),
        "fc2": ("shard_out", 2),
    }


def test_hybrid_leaves_a_layer_whole_that_holds_next_to_nothing():
    assert set(Plan.hybrid(mlp(100, 400, 400, 2), 2).layers) == {"fc0", "fc1"}


def test_hybrid_in_groups_of_one_is_data_parallel():
    assert Plan.hybrid(GRAPH, 4, 1) == Plan.data_parallel(GRAPH, 4)


def test_a_change_returns_another_plan():
    changed = PLAN.with_layer("fc0", shares=(3, 1))
    assert changed.layers["fc0"] == LayerPlan("shard_out", 2, (3, 1))
    assert PLAN.layers["fc0"].shares is None
    assert changed != PLAN
    assert changed.with_layer("fc0") == PLAN
    assert len({PLAN, changed, changed.with_layer("fc0")}) == 2


def test_back_to_replicate():
    assert "fc0" not in PLAN.with_layer("fc0", scheme="replicate").layers
    assert PLAN.with_layer("fc0", scheme="Replicate") == PLAN.with_layer("fc0", scheme="replicate")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(name="fc9", scheme="shard_out"), "did you mean"),
        (dict(name="fc0", scheme="shard"), "did you mean 'shard_in'|did you mean 'shard_out'"),
        (dict(name="relu0", scheme="shard_out"), "layer 'relu0' is of kind 'elementwise'"),
        (
            dict(name="fc0", group_size=3),
            "group_size 3 does not divide world_size 4; valid are 1, 2, 4",
        ),
        (dict(name="fc0", group_size=True), "does not divide"),
        (dict(name="fc0", group_size=0), "does not divide"),
        (
            dict(name="conv", scheme="replicate", group_size=2),
            "'replicate' has group_size 1, got 2",
        ),
        (dict(name="fc0", shares=(1, 2, 3)), "3 shares .* for a group of 2 ranks"),
        (dict(name="fc0", shares=(1, -2)), "shares must be numbers >= 0"),
        (dict(name="fc0", shares=(0, 0)), "all shares are zero"),
        (dict(name="fc0", shares=(float("nan"), 1)), "shares must be numbers >= 0"),
        (dict(name="fc0", scheme="duplicate", shares=(1, 1)), "takes no shares"),
    ],
)
def test_impossible_changes_name_the_layer_and_what_is_valid(change, says):
    name = change.pop("name")
    with pytest.raises(PlanError, match=says) as caught:
        PLAN.with_layer(name, **change)
    assert name in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "4", True])
def test_impossible_worlds(world_size):
    with pytest.raises(PlanError, match="world_size must be a positive integer"):
        Plan.data_parallel(GRAPH, world_size)


def test_impossible_groups_of_a_preset():
    with pytest.raises(PlanError, match="group_size 3 does not divide world_size 4"):
        Plan.hybrid(GRAPH, 4, 3)


def test_text_and_back():
    plan = PLAN.with_layer("fc0", shares=(3, 1)).with_batch_norm("synchronized")
    assert Plan.from_toml(plan.to_toml()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_file_and_back(tmp_path):
    PLAN.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == PLAN


def test_a_layer_that_is_not_there_is_answered_by_those_that_are_meant():
    graph = mlp(8, 8, 4)
    with pytest.raises(PlanError, match="fc0"):
        require(graph, "fc9")
    with pytest.raises(PlanError, match="relu0") as caught:
        require(graph, "relu9", ["relu0"])
    assert "fc0" not in str(caught.value)


def test_names_with_dots_need_no_quotes():
    net = Builder((8,)).linear("classifier.0.fc", 8).linear("classifier.1", 8)
    plan = Plan.data_parallel(net.graph(), 2).with_layer(
        "classifier.0.fc", scheme="shard_out", group_size=2
    )
    head, _, layers = plan.to_toml().partition("[layers]")
    assert '"classifier.0.fc" = {' in layers
    plain = layers.replace('"classifier.0.fc" = {', "classifier.0.fc = {")
    assert Plan.from_toml(f"{head}[layers]{plain}") == plan


def test_the_text_can_be_edited():
    text = PLAN.to_toml().replace(
        'fc0 = {scheme = "shard_out", group_size = 2}',
        'fc0 = {scheme = "duplicate", group_size = 4}',
    )
    assert Plan.from_toml(text) == PLAN.with_layer("fc0", scheme="duplicate", group_size=4)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("world_size = 4", "world_size = 'four'", "world_size must be a positive integer"),
        ("world_size = 4", "world_sizes = 4", "did you mean 'world_size'"),
        ("group_size = 2}", "group_size = 'two'}", "layer 'fc0'.*group_size.*got 'two'"),
        ("group_size = 2}", "group = 2}", "layer 'fc0'.*group"),
        ("fc0 = {", "fc7 = {", "did you mean"),
        ("[plan]", "[plan", "not TOML"),
        ("[plan]", "[other]", r"no \[plan\] table"),
        ('batch_norm = "local"', 'batch_norm = "locale"', "did you mean 'local'"),
        ("output_shape = [64]", "output_shape = [65]", "changed by hand"),
        ('kind = "conv2d", ', "", "kind: missing"),
        ("input_shape = [3, 8, 8]\nnum", "num", "input_shape: missing"),
    ],
)
def test_wrong_text_gets_one_clear_error(old, new, says):
    text = PLAN.to_toml()
    assert old in text
    with pytest.raises(PlanError, match=says):
        Plan.from_toml(text.replace(old, new, 1))


def test_a_text_is_of_65_536_ranks_at_most():
    text = Plan.data_parallel(mlp(4, 2), 2).to_toml()
    most = Plan.from_toml(text.replace("world_size = 2", "world_size = 65_536"))
    assert most.world_size == 65_536
    with pytest.raises(PlanError, match="at most 65,536 in a text, got 65537"):
        Plan.from_toml(text.replace("world_size = 2", "world_size = 65_537"))


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(PlanError, match="this plan is for"):
        Plan.from_toml(PLAN.to_toml(), graph=mlp(3, 4))


@given(
    world=st.sampled_from([1, 2, 4, 6]),
    data=st.data(),
)
def test_any_plan_survives_its_text(world, data):
    plan = Plan.data_parallel(GRAPH, world)
    for name in ("conv", "fc0", "fc1", "fc2"):
        k = data.draw(st.sampled_from([k for k in range(1, world + 1) if world % k == 0]))
        scheme = data.draw(st.sampled_from(["shard_out", "shard_in", "duplicate"]))
        shares = None
        if scheme != "duplicate":
            drawn = st.lists(st.integers(0, 9), min_size=k, max_size=k).filter(any)
            shares = data.draw(st.none() | drawn)
        plan = plan.with_layer(name, scheme=scheme, group_size=k, shares=shares)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_sources_have_arguments_of_several_numbers():
    source = Source("torchvision", "maxvit_t", (("input_size", (224, 224)), ("num_classes", 10)))
    plan = Plan.data_parallel(replace(mlp(4, 4), source=source), 2)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_people_can_read_it():
    line = "<Plan Toy on 4 ranks: fc0=shard_out/2, fc1=shard_in/2, fc2=shard_out/2>"
    assert repr(PLAN).splitlines()[0] == line
    assert "all_gather_rows" not in str(PLAN).splitlines()[2]
    assert "fc0" in str(PLAN)
    html = PLAN._repr_html_()
    assert html.startswith("<div>")
    assert "data:image/svg+xml;base64," in html


def test_recomputation_of_a_layer_is_a_choice_like_others():
    plan = PLAN.with_layer("fc0", shares=(3, 1)).with_layer("fc0", recompute=True)
    assert plan.layers["fc0"] == LayerPlan("shard_out", 2, (3, 1), recompute=True)
    assert plan.with_layer("fc0", shares=(1, 1)).layers["fc0"].recompute
    assert plan.with_layer("fc0", recompute=False) == PLAN.with_layer("fc0", shares=(3, 1))
    relu = PLAN.with_layer("relu0", recompute=True)
    assert relu.layers["relu0"] == LayerPlan(recompute=True)
    assert relu.with_layer("relu0", recompute=False) == PLAN
    assert relu.flow == PLAN.flow


def test_layers_that_follow_each_other_are_one_segment():
    plan = PLAN.with_recompute("fc*", "relu?", "pool")
    assert plan.segments == (("pool",), ("fc0", "relu0", "fc1", "relu1"), ("fc2",))
    assert plan.with_recompute("*", recompute=False) == PLAN
    assert PLAN.segments == ()


def test_rounds_part_a_segment_at_the_gather():
    plan = PLAN.with_recompute("*")
    assert len(plan.segments) == 1
    head, tail = plan.with_rounds("B").segments
    assert (head[0], tail[-1]) == ("conv", "fc2")
    assert set(tail) == set(PLAN.tail.layers)


def test_recomputation_survives_its_text():
    plan = PLAN.with_recompute("fc0", "relu0")
    assert Plan.from_toml(plan.to_toml()) == plan
    assert "relu0 = {recompute = true}" in plan.to_toml()
    text = plan.to_toml().replace("relu0 = {recompute = true}", "relu0 = {recompute = 'maybe'}")
    with pytest.raises(PlanError, match=r"layer 'relu0'.*recompute.*got 'maybe'"):
        Plan.from_toml(text)


def test_people_can_read_what_is_recomputed():
    plan = PLAN.with_recompute("conv", "fc0", "relu0")
    assert repr(plan).splitlines()[0].endswith("fc2=shard_out/2, 3 layers recomputed>")
    lines = {line.split()[0]: line for line in str(plan).splitlines()}
    assert lines["conv"].endswith("segment 1")
    assert lines["relu0"].endswith("segment 2")
    assert "segment" not in lines["fc1"]
    assert "3 layers recomputed" in plan._repr_html_()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["fc00"], "no layer 'fc00' of Toy; did you mean 'fc0'"),
        (["conv.*"], r"no layer 'conv\.\*' of Toy"),
        (["token"], "layer 'token' is of kind 'parameter' and keeps nothing of a batch"),
        (["clamp"], r"layer 'clamp' \(Tensor.clamp_\) writes over its input.*use Tensor.clamp "),
    ],
)
def test_what_cannot_be_recomputed(names, says):
    toy = Builder((4,)).add("token", "parameter", (4,), rows=0)
    graph = toy.linear("fc0", 4, "input").same("conv", "elementwise")
    graph = graph.add("clamp", "elementwise", (4,), target="Tensor.clamp_").graph()
    with pytest.raises(PlanError, match=says):
        Plan.data_parallel(graph, 2).with_recompute(*names)
    if names != ["conv.*"]:
        with pytest.raises(PlanError, match=says):
            Plan.data_parallel(graph, 2).with_layer(names[0], recompute=True)


def test_recompute_is_yes_or_no():
    with pytest.raises(PlanError, match="layer 'fc0': recompute must be True or False, got 1"):
        PLAN.with_layer("fc0", recompute=1)


def test_names_are_recomputed_unless_it_is_said():
    assert PLAN.with_recompute("fc0").layers["fc0"].recompute
    assert Plan.hybrid(vgg(), 4, 2).with_recompute("fc0", "fc1").segments == (("fc0",), ("fc1",))


@pytest.mark.parametrize(
    ("mode", "kind", "evaluating", "does"),
    [
        ("synchronized", "batch_norm", False, True),
        ("synchronized", "batch_norm", True, False),
        ("synchronized", "layer_norm", False, False),
        ("local", "batch_norm", False, False),
    ],
)
def test_synchronized_batch_norm_is_of_all_ranks(mode, kind, evaluating, does):
    plan = Plan(vgg(), 2, batch_norm=mode)
    layer = replace(plan.graph["fc0"], kind=kind, evaluating=evaluating)
    assert plan.synchronizes(layer) == does


def evaluated(world, choices, **fields):
    """A net in which evaluation scales where training drops."""
    trained = Builder((8,)).linear("a", 6).same("drop", "dropout").linear("b", 4).graph()
    alone = Builder((8,)).linear("a", 6).same("scale", "elementwise").linear("b", 4).graph()
    return Plan(replace(trained, evaluation=alone), world, choices, **fields)


def test_a_model_without_its_own_evaluation_evaluates_under_the_same_plan():
    assert PLAN.evaluation is PLAN


def test_evaluation_has_the_choices_of_the_layers_that_it_has():
    a, b = LayerPlan("shard_out", 2, recompute=True), LayerPlan("shard_in", 2)
    plan = evaluated(
        4, {"a": a, "drop": LayerPlan(recompute=True), "b": b}, row_shares=(1, 2, 3, 4)
    )
    there = plan.evaluation
    assert there.graph == plan.graph.evaluation
    assert there.layers == {"a": LayerPlan("shard_out", 2), "b": b}
    assert (there.world_size, there.row_shares) == (4, (1, 2, 3, 4))
    assert there.flow.weights == plan.flow.weights
    assert there.flow.inputs["b"] == plan.flow.inputs["b"]


def test_evaluation_takes_all_rows_at_once():
    plan = evaluated(2, {"a": LayerPlan("shard_out", 2)}, rounds="B")
    assert plan.evaluation.rounds == "BK"


def test_weights_stay_in_place_where_evaluation_reads_otherwise():
    """In training the norm reads pieces; by itself, evaluation would give it the rank's rows."""
    builder = Builder((8,)).linear("a", 6).norm("bn").linear("b", 4)
    alone = Builder((8,)).linear("a", 6).same("norm", "layer_norm").norm("bn").linear("b", 4)
    graph = replace(builder.graph(), evaluation=alone.graph())
    plan = Plan(graph, 2, {"a": LayerPlan("shard_out", 2), "b": LayerPlan("shard_in", 2)})
    assert plan.flow.inputs["bn"].group_size == 2
    assert Plan(alone.graph(), 2, plan.layers).flow.inputs["bn"].group_size == 1
    assert plan.evaluation.flow.inputs["bn"] == plan.flow.inputs["bn"]
    assert plan.evaluation.flow.weights == plan.flow.weights


def test_a_rank_holds_its_pieces_of_what_is_trained():
    builder = Builder((8,)).linear("a", 6).norm("bn").linear("b", 4)
    plan = Plan(builder.graph(), 2, {"a": LayerPlan("shard_out", 2, (2, 1))})
    b, norm = 6 * 4 + 4, 6  # its running mean is no parameter
    assert plan.flow.inputs["bn"].group_size == 2
    assert plan.parameters_of(0) == 4 * 8 + 4 + 4 + b
    assert plan.parameters_of(1) == 2 * 8 + 2 + 2 + b
    assert Plan(builder.graph(), 2).parameters_of(1) == 6 * 8 + 6 + norm + b


def test_rounds_that_are_no_longer_possible_become_one_with_a_warning():
    """Behind another gather, no layers can run in rounds."""
    plan = PLAN.with_rounds("B")
    with pytest.warns(UserWarning, match="rounds 'B' became 'BK'"):
        changed = plan.with_layer("fc2", scheme="shard_out", group_size=4)
    assert changed == PLAN.with_layer("fc2", scheme="shard_out", group_size=4)


def test_on_another_number_of_ranks_groups_lie_alike():
    plan = Plan.hybrid(vgg(), 4, 2)
    flow = plan.flow
    wider = plan.with_world_size(8)
    assert wider == Plan.hybrid(vgg(), 8, 2)
    assert wider.flow is flow  # which is not worked out again
    assert wider.flow == Plan.hybrid(vgg(), 8, 2).flow
    with pytest.raises(PlanError, match="does not divide"):
        plan.with_world_size(5)
