"""A person's own scheme in a plan: what follows from it, what is refused, and its text."""

import pickle

import pytest

from tests.plan.graphs import Builder, mlp
from tests.plan.placement.own import ByGroups, ConvOut, Inside
from workbench.plan import LayerPlan, Plan, PlanError, Weight
from workbench.plan.extension.user_object import Own, mapped
from workbench.plan.placement.placement import ROWS, Layout, Partial, Replicate, Shard
from workbench.plan.placement.schemes import BUILT_IN, Scheme

HERE = "tests.plan.placement.own"


def conv1d():
    """A convolution of one dimension, ReLU, flatten, and two linear layers."""
    weights = (Weight("conv.weight", (6, 3, 3)), Weight("conv.bias", (6,)))
    builder = Builder((3, 8)).add(
        "conv", "op", (6, 8), weights=weights, target="torch.nn.Conv1d", flops=864
    )
    builder.same("relu", "elementwise").add("flat", "flatten", (48,))
    return builder.linear("fc", 8).same("tanh", "elementwise").linear("out", 4).graph()


GRAPH = conv1d()


def plan(**fields):
    return Plan.data_parallel(GRAPH, 4).with_layer("conv", **{"scheme": ConvOut(), **fields})


def test_an_operation_that_nothing_splits_is_cut_and_what_follows_keeps_that():
    flow = plan(group_size=2, shares=(2, 1)).flow
    assert (flow.inputs["conv"], flow.outputs["conv"]) == (
        Layout(2, Replicate()),
        Layout(2, Shard(1, (4, 2))),
    )
    assert flow.inputs["relu"] == flow.outputs["conv"]
    assert flow.outputs["flat"] == Layout(2, Shard(1, (32, 16)))
    assert flow.weights["conv.weight"].piece_shape(3) == (2, 3, 3)
    assert flow.weights["conv.bias"].piece_shape(2) == (4,)
    (gather,) = flow.edges["input", "conv"]
    assert (gather.name, gather.gradient) == ("all_gather_rows", "partial")
    assert flow.inputs["fc"] == ROWS


def test_an_own_scheme_of_a_layer_that_others_split():
    flow = Plan.data_parallel(GRAPH, 2).with_layer("fc", scheme=Inside).flow
    assert flow.outputs["fc"] == Layout(2, Partial())
    assert flow.weights["fc.weight"].placement == Shard(1, (12, 12), 2)
    assert [flow.weights["fc.bias"].piece_numel(rank) for rank in range(2)] == [8, 0]


def test_a_group_of_one_computes_it_whole():
    alone = Plan.data_parallel(GRAPH, 1).with_layer("conv", scheme=ConvOut())
    assert alone.flow.inputs["conv"] == alone.flow.outputs["conv"] == ROWS
    assert alone.flow.weights["conv.weight"].piece_numel(0) == 54


def test_layers_before_it_are_gathered_where_they_are_smallest():
    """As before a built-in scheme that reads whole features."""
    builder = Builder((8, 4, 4)).conv("first", 4).add("pool", "pool", (4, 2, 2))
    builder.add("conv", "op", (6, 2, 2), target="torch.nn.Conv1d", weights=GRAPH["conv"].weights)
    flow = Plan.data_parallel(builder.graph(), 2).with_layer("conv", scheme=ConvOut).flow
    assert flow.edges["pool", "conv"][0].name == "all_gather_rows"
    assert flow.inputs["pool"] == ROWS


@pytest.mark.parametrize("given", [ConvOut, ConvOut(), f"{HERE}:ConvOut"], ids=["class", "", "at"])
def test_it_is_given_as_an_object_a_class_or_where_it_stands(given):
    chosen = plan(scheme=given, group_size=2)
    assert chosen.layers["conv"].name == "ConvOut"
    assert chosen == plan(scheme=chosen.layers["conv"].scheme, group_size=2)
    assert hash(chosen) == hash(plan(scheme=chosen.layers["conv"].scheme, group_size=2))
    assert chosen != plan(scheme=ConvOut(), group_size=4)
    assert "conv=ConvOut/2" in repr(chosen)
    assert "ConvOut" in chosen._repr_html_()


def test_what_can_be_imported_survives_the_text():
    chosen = plan(scheme=f"{HERE}:ConvOut", group_size=2, shares=(2, 1))
    assert f'scheme = "{HERE}:ConvOut"' in chosen.to_toml()
    again = Plan.from_toml(chosen.to_toml(), trust=True)
    assert again == chosen
    assert again.flow.weights == chosen.flow.weights


def test_the_text_of_an_object_is_kept_and_waits_for_it():
    """Nobody but a rank opens its file; the rest of the plan can be read meanwhile."""
    chosen = plan(group_size=2)
    filed = mapped(chosen, lambda own, place: own.lying_in(f"/there/{place}.pickle"))
    again = Plan.from_toml(filed.to_toml(), GRAPH)
    assert again == filed
    assert again.layers["conv"].scheme.file == "/there/layers.conv.scheme.pickle"
    assert not again.is_at_hand
    assert "conv=ConvOut/2" in repr(again)
    assert "was an object of the process that made the plan" in str(again) + again._repr_html_()
    with pytest.raises(PlanError, match="give the object again"):
        _ = again.flow
    back = mapped(again, lambda own, _: chosen.layers["conv"].scheme)
    assert back.flow.weights == chosen.flow.weights
    assert mapped(chosen, lambda own, _: own) is chosen


def test_choices_are_pickled_without_what_was_found():
    choice = LayerPlan(f"{HERE}:ConvOut", 2)
    assert choice.meant.takes(GRAPH["conv"])
    assert pickle.loads(pickle.dumps(choice)) == choice
    assert "meant" not in vars(pickle.loads(pickle.dumps(choice)))


def changed(method, answer, base=ConvOut):
    return type("Odd", (base,), {method: lambda self, *_: answer})()


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (Inside(), r"layer 'conv' cannot have the scheme 'Inside': its `takes` refuses it \(op, "),
        (changed("layouts", (Replicate(), Shard(1, (3, 2)))), "5 elements of the 6 along dimen"),
        (changed("layouts", (Replicate(), Shard(1, (2, 2, 2)))), "into 3 pieces .* group of 2"),
        (changed("layouts", (Replicate(), Shard(0, (3, 3)))), "dimension 0; there are 1 to 2"),
        (changed("layouts", (Replicate(), Shard(1, (1, 2), 2))), "blocks are for weights"),
        (changed("layouts", (Partial(), Replicate())), "no layer can read summands"),
        (changed("layouts", Replicate()), r"must be \(of the input, of the output\)"),
        (changed("layouts", (Replicate(), "S")), "the output is Replicate"),
        (changed("holds", Shard(0, (4, 1))), "'weight' .* 5 elements of the 6"),
        (changed("holds", Partial()), "Replicate.. or a Shard, got Partial"),
        (changed("holds", Replicate()), "its gradient would differ by rank"),
        (changed("units", -1), "`units` must be an integer >= 0, got -1"),
        (object(), "does not extend their base class"),
        (type("shard_out", (ConvOut,), {})(), "'shard_out' is built in"),
    ],
)
def test_what_cannot_be_is_refused_by_name(scheme, text):
    with pytest.raises(PlanError, match=text):
        plan(scheme=scheme, group_size=2)


def test_what_its_own_code_raises_is_told():
    with pytest.raises(PlanError, match="layer 'conv', scheme 'ConvOut': `layouts` raised IndexE"):
        plan(scheme=type("ConvOut", (ConvOut,), {"layouts": lambda *_: ()[0]}), group_size=2)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(kind="batch_norm"), "it is of kind .*its statistics"),
        (dict(draws=(0,)), "it draws random numbers"),
        (dict(weights=(), target="torch.nn.functional.conv1d"), "it is a function"),
        (dict(rows=0), "it depends on no sample"),
    ],
)
def test_layers_that_no_own_scheme_can_have(fields, text):
    given = dict(weights=GRAPH["conv"].weights, target="torch.nn.Conv1d") | fields
    graph = Builder((3, 8)).add("conv", given.pop("kind", "op"), (6, 8), **given).graph()
    with pytest.raises(PlanError, match=f"'conv' cannot have the scheme 'Anything': {text}"):
        Plan.data_parallel(graph, 2).with_layer("conv", scheme=Anything())


class Anything(ConvOut):
    def takes(self, layer):
        return True


def test_shared_weights_and_several_inputs_are_refused():
    graph = Builder((6, 8)).same("one", "elementwise").same("two", "elementwise", "input")
    graph = graph.add("sum", "op", (6, 8), "one", "two", target="torch.nn.Bilinear").graph()
    with pytest.raises(PlanError, match="it reads several tensors"):
        Plan.data_parallel(graph, 2).with_layer("sum", scheme=Anything())
    once = Builder((8,)).linear("fc", 8)
    tied = once.add("again", "linear", (8,), shared="fc", target="torch.nn.Linear").graph()
    with pytest.raises(PlanError, match=r"'fc' shares its weights with 'again', .* 'Inside'"):
        Plan.data_parallel(tied, 2).with_layer("fc", scheme=Inside())


def test_a_rank_without_units_is_refused_where_it_could_not_idle():
    graph = mlp(8, 4)
    assert plan(group_size=4, shares=(1, 1, 1, 0)).flow.weights["conv.weight"].piece_numel(3) == 0
    with pytest.raises(PlanError, match="rank 1 of a group would have none of the 4 units"):
        Plan.data_parallel(graph, 2).with_layer("fc0", scheme=Inside(), shares=(1, 0))


def test_shares_of_what_is_not_cut_are_refused():
    with pytest.raises(PlanError, match="'Odd' is not cut and takes no shares"):
        plan(scheme=changed("units", 0), group_size=2, shares=(1, 1))


def test_the_built_in_ones_are_schemes():
    assert all(isinstance(scheme, Scheme) for scheme in BUILT_IN.values())
    assert isinstance(LayerPlan(ByGroups(), 2).scheme, Own)


@pytest.mark.parametrize(
    ("name", "member", "share"),
    [("shard_out", 0, 0.75), ("shard_in", 1, 0.25), ("duplicate", 1, 1.0)],
)
def test_the_share_of_the_flops(name, member, share):
    layer, shares = mlp(8, 4)["fc0"], None if name == "duplicate" else (3, 1)
    choice = LayerPlan(name, 2, shares)
    division = choice.division(layer)
    read, given = choice.meant.layouts(layer, division, None)
    assert choice.meant.flops(layer, division, member, read, given) == share


def test_own_flops_are_a_share():
    choice = LayerPlan(changed("flops", 1.5), 2)
    division = choice.division(GRAPH["conv"])
    with pytest.raises(PlanError, match="`flops` must be a share from 0 to 1, got"):
        choice.meant.flops(GRAPH["conv"], division, 0, Replicate(), Replicate())
