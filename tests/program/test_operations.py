"""The operations of a pass, by hand: what they read and give, in which types, and who is alike."""

from dataclasses import replace

import pytest

import workbench as wb
from tests.plan.graphs import Builder, mlp
from workbench.plan.graph.graph import Input, Weight
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Layout, Shard
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of

OUT = LayerPlan("shard_out", 2)
CUT = Layout(2, Shard(1, (3, 3)))


def operations(graph, world=2, rounds="BK", precision="fp32", **choices):
    plan = Plan(graph, world, choices, rounds=rounds)
    fields = dict(data="digits", optimizer="sgd", steps=1, batch_size=8)
    return program_of(wb.Experiment(plan=plan, precision=precision, **fields)).operations


def by_label(found):
    return {one.label: one for one in found if one.layer is not None}


def test_each_layer_reads_what_those_before_gave():
    found = operations(mlp(4, 6, 2))
    fc0, relu, fc1 = found
    assert list(found.by_value) == [("fc0", ()), ("relu0", ()), ("fc1", ())]
    assert (fc0.reads, fc0.gives, fc0.wanted) == ((("input", ()),), ("fc0", ()), ())
    assert (relu.reads, relu.wanted) == ((("fc0", ()),), (("fc0", ()),))
    assert (fc1.layer.name, fc1.step, fc1.layout, fc1.shape, fc1.rows) == (
        "fc1",
        None,
        ROWS,
        (2,),
        1,
    )
    assert found.results == (("fc1", ()),)
    assert all(one.computes and one.needs_gradient and one.segment is None for one in found)


@pytest.mark.parametrize(
    ("read", "precision", "width"),
    [
        (Input((4,)), "fp32", 4),
        (Input((4,)), "fp64", 8),
        (Input((4,)), "bf16", 4),
        (Input((4,), "bool"), "fp32", 1),
        (Input((4,), vocabulary=5), "fp32", 8),
    ],
)
def test_an_input_lies_by_rows_in_its_own_type(read, precision, width):
    graph = replace(mlp(4, 6, 2), inputs=(read,))
    found = operations(graph, precision=precision)
    assert found.layout_of(("input", ())) == (ROWS, (4,), 1, width)
    assert not found.needs_gradient(("input", ()))
    (gathered, *_) = operations(graph, precision=precision, fc0=OUT)
    assert (gathered.step.name, gathered.itemsize) == ("all_gather_rows", width)
    assert (gathered.needs_gradient, gathered.wanted) == (False, ())


def test_a_value_lies_as_its_operation_says():
    graph = Builder((4,)).linear("a", 6).add("windows", "op", (2,), rows=3).graph()
    found = operations(graph, a=OUT)
    assert found.layout_of(("a", ())) == (CUT, (6,), 1, 4)
    assert found.layout_of(("windows", ())) == (ROWS, (2,), 3, 4)
    assert found.needs_gradient(("a", ()))


def test_readers_share_a_conversion_which_follows_what_it_converts():
    builder = Builder((4,)).linear("a", 6).linear("b", 2).linear("c", 2, "a")
    found = operations(builder.same("sum", "add", "b", "c").graph(), a=OUT)
    gather, a, scatter, b, c, total = found
    assert [one.label for one in found] == ["a", "a", "b", "b", "c", "sum"]
    assert (gather.reads, gather.gives) == ((("input", ()),), ("input", (gather.step,)))
    assert (scatter.layer, scatter.step.name, scatter.layout) == (None, "all_to_all", ROWS)
    assert (scatter.shape, scatter.rows, scatter.reads) == ((6,), 1, (a.gives,))
    assert b.reads == c.reads == (scatter.gives,)
    assert b.wanted == (scatter.gives,)
    assert scatter.wanted == (a.gives,)
    assert total.reads == (b.gives, c.gives)


def test_nothing_flows_back_through_a_conversion_that_only_others_read():
    builder = Builder((4,)).linear("a", 6).linear("b", 2).same("norm", "layer_norm", "a")
    graph = builder.add("pick", "op", (2,)).graph()
    layers = {layer.name: layer for layer in graph.layers}
    cold = dict(norm=replace(layers["norm"], detached=True))
    cold["pick"] = replace(layers["pick"], detached=True)
    graph = replace(graph, layers=tuple({**layers, **cold}.values()), outputs=("b",))
    found = operations(graph, a=OUT, b=LayerPlan("shard_in", 2))
    scatter = next(one for one in found if one.step and one.step.name == "all_to_all")
    assert (scatter.label, scatter.needs_gradient, scatter.wanted) == ("norm", False, ())
    assert not found.needs_gradient(scatter.gives)


def test_what_a_model_returns_is_converted_for_itself():
    graph = Builder((4,)).linear("a", 6).same("tokens", "add", "a", "a").graph()
    layers = [replace(x, output_shape=(3, 2)) if x.name == "tokens" else x for x in graph.layers]
    cut = replace(graph, layers=(layers[0],), outputs=("a",))
    found = operations(cut, a=OUT)
    assert found.results == (("a", ()),)  # the loss takes cut classes
    inner = operations(replace(graph, outputs=("a", "tokens")), a=LayerPlan("shard_in", 2))
    (last,) = [one for one in inner if one.step is not None and one.gives[0] == "a"]
    assert (last.label, last.step.name) == ("tokens", "reduce_scatter_rows")
    assert inner.results == (last.gives, ("tokens", ()))


HALVES = {
    "linear": ("linear", "", 2),
    "conv2d": ("conv2d", "", 2),
    "attention": ("attention", "", 2),
    "matmul": ("op", "torch.matmul", 2),
    "einsum": ("op", "torch.einsum", 2),
    "bmm": ("op", "Tensor.bmm", 2),
    "op": ("op", "torch.exp", 4),
    "elementwise": ("elementwise", "torch.nn.ReLU", 4),
    "size": ("size", "", 0),
    "embedding": ("embedding", "", 4),
}


@pytest.mark.parametrize(("kind", "target", "width"), HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_autocast_halves_what_multiplies(kind, target, width, precision):
    graph = Builder((4,)).add("one", kind, (4,), target=target).linear("end", 2, "input").graph()
    found = by_label(operations(graph, precision=precision))["one"]
    assert found.itemsize == (width if precision != "fp32" else 4 * (width > 0))


def test_others_have_the_widest_type_that_they_read():
    builder = Builder((4,)).linear("half", 4).same("relu", "elementwise")
    builder.same("both", "add", "relu", "input").same("halves", "add", "relu", "half")
    found = by_label(operations(builder.graph(), precision="bf16"))
    assert {name: one.itemsize for name, one in found.items()} == {
        "half": 2,
        "relu": 2,
        "both": 4,
        "halves": 2,
    }


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(("stated", "width"), [(0, 2), (1, 1), (4, 4), (8, 8)])
def test_what_is_no_real_number_has_its_own_bytes(rows, stated, width):
    """In half precision too, and so has what is made of it, unless the graph says otherwise."""
    builder = Builder((4,)).linear("first", 3)
    builder.add("one", "op", (3,), rows=rows, unreal_bytes=stated).add("real", "op", (3,))
    found = by_label(operations(builder.linear("end", 2).graph(), precision="bf16"))
    assert found["one"].itemsize == width
    assert found["real"].itemsize == (4 if stated else 2)


def test_a_real_number_is_as_wide_as_the_widest_that_it_is_made_of():
    builder = Builder((4,)).add("shifted", "op", (4,), unreal_bytes=8).linear("half", 4, "input")
    builder.same("sum", "add", "shifted", "half")
    found = by_label(operations(builder.linear("end", 2).graph(), precision="bf16"))
    assert [one.itemsize for one in found.values()] == [8, 2, 2, 2]


def test_a_size_is_no_tensor():
    builder = Builder((4,)).add("size", "size", (), rows=0)
    builder.add("range", "op", (4,), "size", unreal_bytes=8)
    found = by_label(operations(builder.linear("fc", 4, "input").graph()))
    assert (found["size"].itemsize, found["range"].itemsize) == (0, 8)
    assert not found["size"].computes


def test_a_parameter_does_not_run():
    token = (Weight("token", (4,)),)
    builder = Builder((4,)).add("token", "parameter", (4,), rows=0, weights=token)
    found = by_label(operations(builder.same("sum", "add", "input", "token").graph()))
    assert [found[name].computes for name in ("token", "sum")] == [False, True]


def test_layers_look_alike_that_compute_and_read_alike():
    found = by_label(operations(mlp(8, 8, 8, 8, 8)))
    looks = {name: one.look for name, one in found.items()}
    assert looks["fc1"] == looks["fc2"] == looks["fc3"] != looks["fc0"]  # which reads the input
    assert looks["relu0"] == looks["relu1"] != looks["fc1"]


@pytest.mark.parametrize(
    "choice", [LayerPlan("shard_out", 2), LayerPlan(recompute=True)], ids=lambda one: one.name
)
def test_a_layer_of_another_choice_looks_otherwise(choice):
    looks = {one.label: one.look for one in operations(mlp(8, 8, 8, 8), fc2=choice) if one.layer}
    assert looks["fc1"] != looks["fc2"]


def test_what_is_recomputed_lies_from_a_segment_s_first_layer_to_its_last():
    token = (Weight("token", (6,)),)
    builder = Builder((4,)).linear("a", 6).same("relu", "elementwise")
    builder.add("token", "parameter", (6,), rows=0, weights=token)
    builder.same("sum", "add", "relu", "token").linear("b", 6).same("relu1", "elementwise")
    again = LayerPlan(recompute=True)
    choices = dict(a=replace(OUT, recompute=True), relu=again, sum=again, relu1=again)
    found = operations(builder.graph(), **choices)
    assert [(one.label, one.step is None, one.segment) for one in found if one.segment != 0] == [
        ("a", False, None),  # what it reads is gathered before
        ("token", True, None),
        ("b", True, None),
        ("relu1", True, 1),
    ]
    assert {one.label for one in found if one.segment == 0} >= {"a", "relu", "sum"}


def test_a_tail_begins_with_the_gather():
    graph = Builder((4,)).linear("a", 6).linear("b", 6).linear("c", 2).graph()
    plan = Plan(graph, 2, dict(b=OUT), rounds="B")
    found = operations(graph, rounds="B", b=OUT)
    head, behind = found.parted(plan.tail)
    assert [one.label for one in head] == ["a"]
    assert [(one.label, one.layer is None) for one in behind][:2] == [("b", True), ("b", False)]
    assert len(head) + len(behind) == len(list(found))
