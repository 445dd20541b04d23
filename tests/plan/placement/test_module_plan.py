"""Plans in torch's own words, of small graphs: which module has which style, and what has none."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder, mlp
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.plans.module_plan import ModulePlan, ModuleStyle
from workbench.plan.plans.plan import Plan

TARGET = "torch.nn.Linear"
OUT, IN = LayerPlan("shard_out", 2), LayerPlan("shard_in", 2)
ALONE = ModuleStyle("colwise", "rows", "rows")


def modules(graph):
    """The graph, its linear layers called as torch's are."""
    layers = [replace(x, target=TARGET) if x.kind == "linear" else x for x in graph.layers]
    return replace(graph, layers=tuple(layers))


def told(graph, world=4, **choices):
    return Plan(modules(graph), world, choices).module_plan()


NET = mlp(8, 16, 12, 4)


def test_the_tensor_between_a_pair_stays_cut():
    assert told(NET, fc0=OUT, fc1=IN) == ModulePlan(
        model="Toy",
        world_size=4,
        group_size=2,
        styles={
            "fc0": ModuleStyle("colwise", "rows", "features"),
            "fc1": ModuleStyle("rowwise", "features", "rows"),
        },
        replicated=("fc2.weight", "fc2.bias"),
        sharded=("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"),
        blocks=(),
    )


def test_where_nothing_is_split_modules_are_blocks():
    assert told(NET) == ModulePlan(
        "Toy", 4, 1, {}, tuple(f"fc{i}.{w}" for i in range(3) for w in ("weight", "bias")), (), ()
    )


@pytest.mark.parametrize(
    ("world", "k", "mesh"), [(6, 1, (6,)), (6, 2, (3, 2)), (6, 6, (1, 6)), (1, 1, (1,))]
)
def test_the_mesh_is_of_replicas_by_group(world, k, mesh):
    assert ModulePlan("Toy", world, k, {}, (), (), ()).mesh_shape == mesh


def test_it_is_a_table(tmp_path):
    plan = told(NET, fc0=OUT, fc1=IN)
    assert plan.to_frame().to_numpy().tolist() == [
        ["fc0", "colwise", "rows", "features"],
        ["fc1", "rowwise", "features", "rows"],
    ]
    assert '<td style="text-align:left">rowwise</td>' in plan._repr_html_()
    plan.save(tmp_path / "x.html")
    title = "<h1>ModulePlan of Toy on a mesh of 2x2</h1>"
    assert title in (tmp_path / "x.html").read_text("utf-8")
    blocks = ModulePlan("Toy", 2, 1, {}, (), (), ("body",))
    assert blocks.to_frame().to_numpy().tolist() == [["body", "fully_shard", "rows", "rows"]]
    assert repr(blocks) == "<ModulePlan of Toy on a mesh of 2: data parallel>"


def test_a_group_of_one_rank_splits_nothing():
    one = told(NET, fc0=LayerPlan("shard_out", 1))
    assert (one.styles, one.sharded) == ({}, ())


def test_what_is_cut_by_inputs_gives_rows():
    pair = told(Builder((8,)).linear("a", 6).linear("b", 4).graph(), a=IN, b=IN)
    assert pair.styles == {name: ModuleStyle("rowwise", "rows", "rows") for name in "ab"}


@pytest.mark.parametrize("between", [1, 2])
def test_layers_that_keep_the_cut_lie_between(between):
    builder = Builder((8,)).linear("a", 6)
    for index in range(between):
        builder.same(f"relu{index}", "elementwise")
    plan = told(builder.linear("b", 4).graph(), a=OUT, b=IN)
    assert plan.styles["a"].gives == plan.styles["b"].reads == "features"


def test_rows_come_back_before_a_layer_that_needs_whole_samples():
    graph = Builder((8,)).linear("a", 6).same("norm", "layer_norm").linear("b", 4).graph()
    assert told(graph, a=OUT, b=IN).styles == {
        "a": ALONE,
        "b": ModuleStyle("rowwise", "rows", "rows"),
    }


def test_rows_come_back_behind_the_last_layer():
    assert told(mlp(8, 4), fc0=OUT).styles == {"fc0": ALONE}
    assert told(Builder((8,)).linear("a", 4).same("relu", "elementwise").graph(), a=OUT).styles == {
        "a": ALONE
    }


def test_rows_come_back_before_the_sum_of_two_layers():
    def summed(*inputs):
        builder = Builder((8,)).linear("a", 6).linear("b", 6, "input")
        return builder.same("sum", "add", *inputs).linear("c", 4).graph()

    cut = dict(a=OUT, b=OUT, c=IN)
    assert told(summed("a", "b"), **cut).styles["a"] == ALONE
    assert told(summed("a", "a"), **cut).styles["a"].gives == "features"


def test_one_of_two_readers_that_needs_whole_samples_is_enough():
    builder = Builder((8,)).linear("a", 6).linear("b", 4, "a").same("norm", "layer_norm", "a")
    graph = builder.linear("c", 4).same("sum", "add", "b", "c").graph()
    assert told(graph, a=OUT, b=IN).styles["a"].gives == "rows"


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (["0", "features.3"], ()),
        (["blocks.0.fc", "blocks.0.out", "blocks.1.fc", "head"], ("blocks.0", "blocks.1")),
        (["a.2.b.7.fc", "a.2.c"], ("a.2",)),
        (["0.fc"], ("0",)),
    ],
)
def test_blocks_are_the_outer_numbered_containers(names, blocks):
    builder = Builder((8,))
    for name in names:
        builder.linear(name, 8)
    assert told(builder.graph()).blocks == blocks


def test_blocks_hold_parameters_of_modules():
    builder = Builder((8,)).linear("blocks.0.fc", 8).same("blocks.1.relu", "elementwise")
    graph = builder.linear("blocks.2.scale", 8).graph()
    bare = [replace(x, kind="parameter") if "scale" in x.name else x for x in graph.layers]
    assert told(replace(graph, layers=tuple(bare))).blocks == ("blocks.0",)


def test_it_prints_as_a_list_of_styles():
    assert str(told(NET, fc0=OUT, fc1=IN)).splitlines() == [
        "Toy on a mesh of 2x2",
        "  fc0: colwise, reads rows, gives features",
        "  fc1: rowwise, reads features, gives rows",
    ]


@pytest.mark.parametrize(
    ("count", "said"), [(0, "none"), (1, "b0"), (4, "b0, b1, b2, b3"), (5, "b0, b1, b2, b3, ...")]
)
def test_it_prints_the_first_four_blocks(count, said):
    plan = ModulePlan("Toy", 3, 1, {}, (), (), tuple(f"b{i}" for i in range(count)))
    assert str(plan) == f"Toy on a mesh of 3\n  data parallel; blocks {said}"


def refusal(plan):
    with pytest.raises(PlanError) as caught:
        plan.module_plan()
    return str(caught.value)


PAIR = Plan(modules(NET), 4, dict(fc0=OUT, fc1=IN))


def test_rounds_have_no_name():
    assert "rounds 'B' have no name" in refusal(PAIR.with_rounds("B"))


def test_unequal_rows_have_no_name():
    assert "rows are 1:1:1:2, and" in refusal(PAIR.with_rows((1, 1, 1, 2)))
    assert PAIR.with_rows((2, 2, 2, 2)).module_plan() == PAIR.module_plan()


def test_synchronized_batch_norm_is_another_module():
    normed = Builder((8,)).linear("a", 6).norm("bn").linear("b", 4).graph()
    plan = Plan(modules(normed), 2)
    assert plan.module_plan().group_size == 1
    assert "'bn': synchronized batch norm" in refusal(plan.with_batch_norm("synchronized"))
    assert PAIR.with_batch_norm("synchronized").module_plan() == PAIR.module_plan()
    frozen = [replace(x, evaluating=x.kind == "batch_norm") for x in plan.graph.layers]
    plan = replace(plan, graph=replace(plan.graph, layers=tuple(frozen)))
    assert plan.with_batch_norm("synchronized").module_plan() == plan.module_plan()


def test_recomputation_has_no_name():
    assert refusal(PAIR.with_recompute("relu1")).startswith("'relu1': recomputation is")


def test_groups_of_several_sizes_have_no_mesh():
    plan = Plan(modules(NET), 4, dict(fc0=OUT, fc1=LayerPlan("shard_out", 4), fc2=OUT))
    assert "this plan has 'fc0' over 2, 'fc1' over 4; take one" in refusal(plan)
    plan = Plan(modules(mlp(8, 8, 8)), 8, dict(fc0=LayerPlan("shard_out", 8), fc1=OUT))
    assert "this plan has 'fc1' over 2, 'fc0' over 8; take one" in refusal(plan)


@pytest.mark.parametrize(
    ("scheme", "target", "said"),
    [
        ("duplicate", TARGET, "'fc0': duplicate of torch.nn.Linear has no style"),
        ("shard_out", "torch.nn.Bilinear", "'fc0': shard_out of torch.nn.Bilinear has no style"),
        ("shard_in", "", "'fc0': shard_in of linear has no style"),
    ],
)
def test_other_layers_and_schemes_have_no_style(scheme, target, said):
    layers = [replace(x, target=target) for x in mlp(8, 4).layers]
    graph = replace(mlp(8, 4), layers=tuple(layers))
    assert said in refusal(Plan(graph, 2, dict(fc0=LayerPlan(scheme, 2))))


def test_weights_of_two_layers_would_be_cut_twice():
    graph = modules(Builder((8,)).linear("a", 8).linear("b", 8).graph())
    first, second = graph.layers
    layers = (first, replace(second, name="a@1", weights=(), shared="a"))
    twice = replace(graph, layers=layers, outputs=("a@1",))
    assert Plan.data_parallel(twice, 2).module_plan().styles == {}
    plan = Plan(twice, 2, {"a": OUT, "a@1": OUT})
    assert "'a' shares weights with another layer" in refusal(plan)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (LayerPlan("shard_out", 2, (1, 2)), "'fc0': pieces of 2/4 are not"),
        (LayerPlan("shard_in", 2, (3, 1)), "'fc0': pieces of 6/2 are not"),
        (LayerPlan("shard_out", 4), "6 is a multiple of 4"),
    ],
)
def test_unequal_pieces_are_not_torch_s(scheme, said):
    assert said in refusal(Plan(modules(mlp(8, 6)), 4, dict(fc0=scheme)))
