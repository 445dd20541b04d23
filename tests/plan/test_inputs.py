"""What a model reads, as a value, and graphs of several inputs as text."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder, mlp
from workbench.plan.graph.graph import (
    Graph,
    Input,
    Layer,
    Source,
    Weight,
    plain_input,
    sample_bytes,
    shown,
)
from workbench.plan.io.errors import PlanError
from workbench.plan.plans.plan import Plan

IMAGE, IDS, MASK = (
    Input((3, 8, 8), name="image"),
    Input((5,), vocabulary=9, name="ids"),
    Input((5,), "bool", name="mask"),
)


def both() -> Graph:
    """Two linear layers, each of an input of its own, and what adds them."""
    weights = (Weight("a.weight", (2, 4)),), (Weight("b.weight", (2, 6)),)
    layers = (
        Layer("a", "linear", ("input.x",), (4,), (2,), weights=weights[0], node="a"),
        Layer("b", "linear", ("input.y",), (6,), (2,), weights=weights[1], node="b"),
        Layer("sum", "add", ("a", "b"), (2,), (2,), node="sum"),
    )
    inputs = Input((4,), name="x"), Input((6,), name="y")
    return Graph(Source("module", "Both"), inputs, 2, layers, ("sum",))


def test_whole_numbers_are_int64():
    assert (IDS.dtype, Input((5,), "int64", 9)) == ("int64", replace(IDS, name=""))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(shape=(0,)), "one sample's without the batch"),
        (dict(shape=("a",)), "one sample's without the batch"),
        (dict(shape=(2,), dtype="float16"), "got 'float16'"),
        (dict(shape=(2,), dtype="int64"), "says how many there are"),
        (dict(shape=(2,), dtype="bool", vocabulary=2), "says how many there are"),
        (dict(shape=(2,), vocabulary=0), "1 or more, got 0"),
        (dict(shape=(2,), vocabulary=2.5), "1 or more, got 2.5"),
        (dict(shape=(-1,)), "one sample's without the batch"),
        (dict(shape=(2.5,)), "one sample's without the batch"),
    ],
)
def test_impossible_inputs(given, says):
    with pytest.raises(ValueError, match=says):
        Input(**given)


def test_the_least_inputs():
    assert Input([1], vocabulary=1) == Input((1,), "int64", 1)
    assert Input(()).is_real
    assert not IDS.is_real
    assert not MASK.is_real


def test_bytes_of_a_sample_are_those_of_all_inputs():
    assert sample_bytes((IMAGE, IDS, MASK), 4) == 3 * 8 * 8 * 4 + 5 * 8 + 5
    assert sample_bytes((IMAGE, IDS, MASK), 8) == 3 * 8 * 8 * 8 + 5 * 8 + 5
    assert sample_bytes((Input(()),), 4) == 4


def test_inputs_read_well():
    assert shown((IMAGE, IDS, MASK)) == "image 3x8x8, ids 5 of 9 tokens, mask 5 bool"
    assert shown((Input((3, 8, 8)),)) == "3x8x8"
    assert shown((Input((), name="t"),)) == "t a number"


def test_only_one_first_tensor_that_is_no_mask_is_plain():
    one = Input((4,))
    assert plain_input((one,)) is one
    assert not any(map(plain_input, [(IMAGE,), (Input((4,), "bool"),), (IMAGE, IDS), (one, one)]))


def test_layers_read_several_inputs_under_their_names():
    graph = both()
    assert graph.consumers["input.x"] == ("a",)
    assert (graph.shape_of("input.y"), graph.rows_of("input.y")) == ((6,), 1)
    assert (graph.shape_of("sum"), graph.rows_of("sum")) == ((2,), 1)
    with pytest.raises(ValueError, match=r"Both reads input\.x, input\.y"):
        _ = graph.input_shape
    with pytest.raises(ValueError, match=r"Both reads input\.x, input\.y"):
        _ = graph.vocabulary


def test_scores_of_tokens_have_as_many_tokens_as_an_input():
    graph = Builder((5, 4)).linear("head", 3).graph()
    assert replace(graph, inputs=(IDS, MASK)).scores_tokens
    assert not replace(graph, inputs=(replace(IDS, shape=(4,)), MASK)).scores_tokens
    assert not replace(graph, inputs=(IMAGE, MASK)).scores_tokens


def test_plans_of_several_inputs_are_read_again():
    plan = Plan.hybrid(both(), 2, 2)
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.graph.inputs == plan.graph.inputs


@pytest.mark.parametrize("one", [Input((4,), name="x"), Input((4,), "bool"), Input((), name="x")])
def test_an_input_that_is_not_plain_is_part_of_the_fingerprint_and_of_the_text(one):
    graph = replace(mlp(4, 3), inputs=(one,))
    assert graph.fingerprint != mlp(4, 3).fingerprint
    plan = Plan.data_parallel(graph, 1)
    assert Plan.from_toml(plan.to_toml()).graph.inputs == (one,)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "y"', 'name = "x"', "each has its own name"),
        ('{shape = [6], name = "y"}', "{shape = [6]}", "each has its own name"),
        ("{shape = [6],", '{shape = [6], dtype = "half",', "got 'half'"),
        ("{shape = [6],", "{shape = [0],", "one sample's without the batch"),
        ("{shape = [6],", "{", "shape: missing"),
        ("{shape = [6],", "{shape = [7],", "changed by hand"),
    ],
)
def test_wrong_inputs_in_a_text_get_one_clear_error(old, new, says):
    text = Plan.data_parallel(both(), 2).to_toml()
    assert old in text
    with pytest.raises(PlanError, match=says):
        Plan.from_toml(text.replace(old, new))
