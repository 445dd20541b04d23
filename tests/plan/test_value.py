"""What `?`, Tab and an error tell of a value."""

import inspect
import tomllib
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import workbench as wb
from tests.plan import graphs
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.value import Value, by_name, dump, own_names


def values(base: type = Value) -> Iterator[type[Value]]:
    for each in base.__subclasses__():
        yield each
        yield from values(each)


PUBLIC = sorted(
    {each for each in values() if each.__name__ in wb.__all__ and getattr(wb, each.__name__)},
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize("value", PUBLIC, ids=lambda value: value.__name__)
def test_every_field_that_can_be_given_is_documented(value):
    told = inspect.getdoc(value)
    for name in inspect.signature(value).parameters:
        if name in value.model_fields:
            assert f"\n    {name}: " in told


@pytest.mark.parametrize("value", PUBLIC, ids=lambda value: value.__name__)
def test_tab_completes_what_is_ours(value):
    pydantic = {name for name in dir(BaseModel) if name[:1] != "_"} - set(vars(value))
    assert pydantic.isdisjoint(dir(value))
    assert "replace" in dir(value)


def test_what_begins_with_a_line_is_not_shown_and_stays():
    assert own_names(["__init__", "model_dump", "lr", "_own"]) == ["__init__", "lr", "_own"]


def test_a_value_without_fields_documents_none():
    assert "Attributes:" not in inspect.getdoc(wb.Digits)
    assert "Attributes:" in inspect.getdoc(wb.SGD)


def test_a_field_that_has_one_kind_of_entries_is_no_constant():
    class Listed(Value):
        __module__ = "workbench.listed"
        kind: Literal["listed"] = Field(default="listed", description="What it is.")
        sizes: list[int] = Field(default=[1], description="How large they are.")

    assert "sizes: How large they are." in inspect.getdoc(Listed)
    assert "What it is." not in inspect.getdoc(Listed)
    assert list(inspect.signature(Listed).parameters) == ["sizes"]


NAMED = {"sgd": wb.SGD, "adam": wb.Adam}


@pytest.mark.parametrize(
    ("also", "given", "said"),
    [
        ("", "lion", "^no rule 'lion'; there are 'sgd', 'adam'$"),
        ("a function", "lion", "^no rule 'lion'; there are 'sgd', 'adam' and a function$"),
        ("", "LBFGS", "^no rule 'LBFGS': it looks at all; there are 'sgd', 'adam'$"),
        ("", {"kind": "lbfgs"}, "no rule 'lbfgs': it looks at all"),
        ("", 3, r"^int is no rule .* such as wb.SGD\(...\), and their names: 'sgd', 'adam'$"),
        ("", wb.Digits, "^Digits is no rule"),
    ],
)
def test_a_name_of_none_is_told_the_others(also, given, said):
    with pytest.raises(ValueError, match=said):
        by_name("rule", NAMED, also, {"lbfgs": "it looks at all"}).func(given)


def test_a_name_is_the_value_with_all_defaults():
    value = by_name("rule", NAMED).func
    assert value("adam") == wb.Adam()
    assert value(given := wb.SGD(lr=0.1)) is given
    assert value(table := {"kind": "other"}) is table  # as the fields' own checks say


def test_a_text_has_a_line_for_each_entry():
    tables = {"a": {"x": 1, "y": (1, 2), "z": {"b": [{"c": 1}]}}, "rows": [{"d": 1}, {"d": 2}]}
    assert dump(tables).split("\n") == [
        "[a]",
        "x = 1",
        "y = [1, 2]",
        "z = {b = [{c = 1}]}",
        "",
        "[[rows]]",
        "d = 1",
        "",
        "[[rows]]",
        "d = 2",
        "",
    ]
    assert dump({"a": {"x": [{"c": 1}, {"c": 2}], "y": []}}).split("\n") == [
        "[a]",
        "x = [",
        "    {c = 1},",
        "    {c = 2},",
        "]",
        "y = []",
        "",
    ]


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
PLAIN = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXTS
)
NESTED = st.recursive(
    PLAIN, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3)
)


@given(st.dictionaries(TEXTS, st.dictionaries(TEXTS, NESTED, max_size=3), max_size=3))
@settings(deadline=None, derandomize=True)
def test_a_text_says_what_was_written(tables):
    assert tomllib.loads(dump(tables)) == tables


def test_a_text_can_hold_every_character():
    text = "".join(map(chr, range(256))) + "\u2028"
    assert tomllib.loads(dump({"a": {text: text}})) == {"a": {text: text}}


def test_what_no_text_can_say():
    with pytest.raises(TypeError, match="TOML has no NoneType: None"):
        dump({"a": {"x": None}})


def test_instances_as_well():
    shown = [name for name in dir(wb.SGD(0.1)) if name[:1] != "_"]
    assert {"lr", "momentum", "replace"} <= set(shown)
    assert not [name for name in shown if name.startswith("model_")]


def test_signatures_say_what_is_given_without_a_name():
    assert str(inspect.signature(wb.Codec)).startswith("(*, name, error_feedback=False")
    assert str(inspect.signature(wb.AdamW)).startswith("(lr=0.001, *, maximize=False")
    assert str(inspect.signature(wb.ParameterGroup)) == "(*patterns, dims=None, **options)"


def test_data_is_to_be_given():
    plan = wb.Plan.data_parallel(graphs.mlp(4, 4), 1)
    with pytest.raises(ExperimentError, match=r'data: missing; The samples: "digits", "synth'):
        wb.Experiment(plan=plan, optimizer="sgd", steps=1)
    with pytest.raises(ExperimentError, match="data: missing"):
        wb.Experiment(plan=plan, optimizer="sgd", epochs=1)
    with pytest.raises(ExperimentError, match="steps: missing; The number of optimizer updates"):
        wb.Experiment(plan=plan, data="digits", optimizer="sgd")


def test_what_is_given_without_a_name_is_told_the_names():
    with pytest.raises(TypeError, match=r"TorchData takes its fields by name, train=, .*; got 2 "):
        wb.TorchData([1], [2])


def test_a_table_has_the_fields_that_were_given():
    plan = wb.Plan.data_parallel(graphs.mlp(4, 2), 2)
    run = wb.Experiment(plan=plan, data="digits", optimizer=wb.SGD(lr=0.1), steps=3)
    assert run.to_frame().to_dict("split")["data"] == [
        ["plan", "Plan Toy on 2 ranks: data parallel"],
        ["data", "Digits()"],
        ["optimizer", "SGD(lr=0.1)"],
        ["steps", "3"],
    ]
    assert list(wb.SGD(lr=0.1).to_frame()["value"]) == ["0.1"]
