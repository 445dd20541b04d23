"""What a model is as a value: what follows from its layers, and which of them compute alike."""

import pickle
import re
from dataclasses import fields, replace

import pytest

from tests.plan.graphs import Builder, mlp
from workbench.plan.graph.graph import Input, Source, Weight
from workbench.plan.io.errors import unknown


def test_layers_alike_have_one_number():
    alike = mlp(8, 8, 8, 8).alike
    assert alike["fc0"] == alike["fc1"] == alike["fc2"]
    assert alike["fc0"] != alike["relu0"]


def test_other_shapes_or_frozen_weights_are_not_alike():
    graph = mlp(8, 8, 6)
    assert graph.alike["fc0"] != graph.alike["fc1"]
    first, *rest = mlp(8, 8, 8).layers
    frozen = replace(first, weights=tuple(replace(w, trainable=False) for w in first.weights))
    other = replace(graph, layers=(frozen, *rest))
    assert other.alike["fc0"] != other.alike["fc1"]


def test_numbers_of_what_is_alike_count_from_zero():
    assert mlp(8, 8, 6, 8, 6).alike == {
        "fc0": 0,
        "relu0": 1,
        "fc1": 2,
        "relu1": 3,
        "fc2": 4,
        "relu2": 1,
        "fc3": 2,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "op"},
        {"target": "torch.nn.Other"},
        {"input_shape": (9,)},
        {"output_shape": (9,)},
        {"rows": 2},
        {"flops": 1},
        {"groups": 2},
        {"heads": 2},
        {"weights": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_in_anything_are_not_alike(change):
    first, relu, last = mlp(8, 8, 8).layers
    other = replace(mlp(8, 8, 8), layers=(first, relu, replace(last, **change)))
    assert other.alike["fc0"] != other.alike["fc1"]


OTHERS = {
    "source": dict(source=Source("module", "Other")),
    "input": dict(inputs=(Input((9,)),)),
    "tokens": dict(inputs=(Input((8,), vocabulary=3),)),
    "more tokens": dict(inputs=(Input((8,), vocabulary=4),)),
    "outputs": dict(outputs=("fc0", "fc1")),
    "roles": dict(roles=("auxiliary",)),
    "layers": dict(layers=mlp(8, 8, 6).layers[:2]),
    "evaluation": dict(evaluation=mlp(8, 6)),
    "another evaluation": dict(evaluation=mlp(8, 5)),
    "two samples": dict(least_batch=2),
    "three samples": dict(least_batch=3),
}


def test_a_fingerprint_is_twelve_digits_of_all_that_a_model_is():
    graph = mlp(8, 8, 6)
    found = [graph.fingerprint, *(replace(graph, **other).fingerprint for other in OTHERS.values())]
    assert len(set(found)) == len(found)
    assert all(len(each) == 12 and int(each, 16) >= 0 for each in found)
    assert mlp(8, 8, 6).fingerprint == graph.fingerprint


def test_what_a_model_has_is_the_sum_of_what_its_layers_have():
    first, relu, last = mlp(8, 6, 5).layers
    frozen = [replace(weight, trainable=False, frozen=True) for weight in last.weights]
    counted = replace(relu, flops=7, uncounted=True)
    graph = replace(mlp(8, 6, 5), layers=(first, counted, replace(last, weights=tuple(frozen))))
    assert mlp(8, 6, 5).parameters == 8 * 6 + 6 + 6 * 5 + 5
    assert (graph.parameters, graph.frozen) == (8 * 6 + 6, 6 * 5 + 5)
    assert graph.size_text == "54 trained and 35 frozen parameters"
    assert mlp(8, 6, 5).size_text == "89 parameters"
    assert graph.flops == 2 * 8 * 6 + 7 + 2 * 6 * 5
    assert (graph.uncounted, mlp(8, 6, 5).uncounted) == (("relu0",), ())
    assert repr(graph).endswith("1.63e-07 GFLOP per sample without those of relu0>")


@pytest.mark.parametrize(
    ("fields", "known", "text"),
    [
        (dict(flops=0), 0, "0.00"),
        (dict(flops=1_234_500_000), 1_234_500_000, "1,234.50"),
        (dict(flops=2_000_000, uncounted=True), 2_000_000, "2.00 or more"),
        (dict(flops=0, uncounted=True), 0, "unknown"),
        (dict(flops=None), 0, "unknown"),
    ],
)
def test_flops_are_known_or_not(fields, known, text):
    layer = replace(LAYER, **fields)
    assert (layer.counted_flops, layer.flops_text) == (known, text)


LAYER = mlp(8, 6).layers[0]


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        (dict(), True),
        (dict(weights=(), target="torch.nn.ReLU"), True),
        (dict(weights=(), target="torch.relu"), False),
        (dict(weights=(), target="operator.add"), False),
        (dict(weights=(), target="Tensor.flatten"), False),
        (dict(weights=(), target="ReLU"), True),
        (dict(weights=(), target=""), False),
    ],
)
def test_a_module_has_weights_or_is_called_like_a_class(fields, calls):
    assert replace(LAYER, **fields).calls_module == calls


def test_a_weight_has_a_name_in_its_layer():
    assert LAYER.within(LAYER.weights[1]) == "bias"
    assert LAYER.within(Weight("other.weight", ())) == "other.weight"


@pytest.mark.parametrize(
    ("kind", "evaluating", "of_batch"),
    [("batch_norm", False, True), ("batch_norm", True, False), ("layer_norm", False, False)],
)
def test_batch_norm_is_of_the_batch_unless_it_evaluates(kind, evaluating, of_batch):
    assert replace(LAYER, kind=kind, evaluating=evaluating).of_batch == of_batch


def test_the_first_weight_is_the_one_that_is_kept():
    weight, bias = LAYER.weights
    cold = replace(weight, frozen=True), replace(bias, frozen=True)
    assert replace(LAYER, weights=(cold[0], bias)).keeps_weight
    assert not replace(LAYER, weights=(weight, cold[1])).keeps_weight
    assert not replace(LAYER, weights=()).keeps_weight


def test_draws_are_random():
    assert replace(LAYER, draws=(0,)).random
    assert not LAYER.random


def branched():
    """Two layers read the input, one of them twice, and an addition reads both."""
    builder = Builder((4,)).linear("a", 4).linear("b", 4, "input").same("square", "mul", "b", "b")
    return builder.same("sum", "add", "a", "square").graph()


def test_consumers_are_told_once_and_in_order():
    assert branched().consumers == {
        "input": ("a", "b"),
        "a": ("sum",),
        "b": ("square",),
        "square": ("sum",),
        "sum": (),
    }


def test_weights_belong_to_layers():
    assert branched().owners == {"a.weight": "a", "a.bias": "a", "b.weight": "b", "b.bias": "b"}


def test_layers_that_share_weights_are_the_owner_and_the_user():
    a, b, *rest = branched().layers
    tied = replace(branched(), layers=(a, replace(b, weights=(), shared="a"), *rest))
    assert tied.shares_weights == {"a", "b"}
    assert branched().shares_weights == frozenset()


def test_gradients_flow_back_to_what_is_trained_and_is_above_it():
    a, b, square, total = branched().layers
    cold = tuple(replace(weight, trainable=False) for weight in b.weights)
    graph = replace(branched(), layers=(a, replace(b, weights=cold), square, total))
    assert branched().learning == {"a", "b", "square", "sum"}
    assert graph.learning == {"a", "sum"}
    assert replace(graph, layers=(*graph.layers[:3], replace(total, kind="size"))).learning == {"a"}
    cut = replace(graph, layers=(replace(a, detached=True), *graph.layers[1:]))
    assert cut.learning == frozenset()
    user = replace(b, weights=(), shared="a")
    tied = replace(branched(), layers=(replace(a, detached=True), user, square, total))
    assert tied.learning == {"b", "square", "sum"}


@pytest.mark.parametrize(
    ("inputs", "shape", "scores", "labels"),
    [
        ((Input((8,)),), (10,), False, ()),
        ((Input((8,)),), (5, 10), False, (10,)),
        ((Input((5,), vocabulary=9),), (10,), False, ()),
        ((Input((5,), vocabulary=9),), (5, 10), True, (5,)),
        ((Input((5,), vocabulary=9),), (3, 10), True, (3,)),  # of one input: whatever it makes
        ((Input((5,), vocabulary=9, name="a"), Input((4,), name="b")), (3, 10), False, (10,)),
        ((Input((5,), vocabulary=9, name="a"), Input((4,), name="b")), (5, 10), True, (5,)),
    ],
)
def test_classes_are_of_a_sample_or_of_each_token(inputs, shape, scores, labels):
    layer = replace(LAYER, output_shape=shape)
    graph = replace(mlp(8, 6), inputs=inputs, layers=(layer,))
    assert (graph.scores_tokens, graph.label_shape) == (scores, labels)


def test_a_layer_that_is_not_there_is_told_the_nearest():
    with pytest.raises(KeyError, match="no layer 'fc9' of Toy; did you mean 'fc1', 'fc0'"):
        mlp(8, 8, 8)["fc9"]


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "there are $"), (2, "there are 'a0', 'a1'$"), (8, "'a7'$"), (9, "'a7', ...$")],
)
def test_a_name_that_is_near_none_is_told_the_first_eight(count, told):
    names = [f"a{index}" for index in range(count)]
    assert re.search(told, unknown("thing", "xyz", reversed(names)))
    assert "'a8'" not in unknown("thing", "xyz", names)


def test_a_graph_is_a_line_for_each_layer():
    line = mlp(8, 6).to_frame().to_dict("records")
    assert line == [
        {
            "layer": "fc0",
            "kind": "linear",
            "inputs": ("input",),
            "input_shape": (8,),
            "output_shape": (6,),
            "parameters": 54,
            "flops": 96,
            "activation_bytes": 0,
        }
    ]


def test_a_graph_travels_without_what_was_worked_out():
    graph = mlp(8, 6)
    assert graph.fingerprint
    back = pickle.loads(pickle.dumps(graph))
    assert back == graph
    assert not set(vars(back)) - {field.name for field in fields(graph)}


def test_a_source_travels_without_its_module():
    source = Source("module", "Net", module=object(), skeleton=b"x")
    assert (pickle.loads(pickle.dumps(source)).module, source.module is None) == (None, False)
    assert pickle.loads(pickle.dumps(source)).skeleton == b"x"


def test_what_follows_from_weights_is_no_part_of_a_fingerprint():
    graph = mlp(8, 6)
    other = replace(graph, layers=(replace(graph.layers[0], num_embeddings=3),))
    assert other != graph
    assert other.fingerprint == graph.fingerprint
    held = replace(graph.source, skeleton=b"x", module=object(), frozen=frozenset())
    assert replace(graph, source=held).fingerprint == graph.fingerprint
    assert replace(graph, source=held) == graph


def test_a_table_has_the_layers_that_hold_parameters_or_are_not_counted():
    first, relu, last = mlp(8, 6, 5).layers
    unknown_relu = replace(relu, uncounted=True)
    graph = replace(mlp(8, 6, 5), layers=(first, relu, last))
    assert "relu0" not in graph._repr_html_()
    assert ">fc0</td>" in graph._repr_html_()
    told = replace(graph, layers=(first, unknown_relu, last))._repr_html_()
    for said in (">fc0</td>", ">relu0</td>", "FLOPs of relu0 are not known", "sample of 8 "):
        assert said in told
