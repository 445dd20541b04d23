"""The editor's menus offer schemes and rules of a person's own beside the built-in ones."""

import importlib.metadata

import pytest

import workbench as wb
from tests.plan.graphs import mlp
from tests.plan.placement.own import ConvOut, Inside
from tests.plan.placement.test_own_schemes import GRAPH
from workbench.plan.plans.rule import Rule

HERE = "tests.plan.placement.own"


class Doubled(Rule):
    description = "all linear layers by their output"

    def plan(self, graph, world_size):
        plan = wb.Plan.data_parallel(graph, world_size)
        for layer in graph.layers:
            if layer.kind == "linear":
                plan = plan.with_layer(layer.name, scheme="shard_out")
        return plan


class Failing(Rule):
    def plan(self, graph, world_size):
        return 3 / 0


@pytest.fixture
def editor():
    with_own = wb.PlanEditor(
        GRAPH, world_size=2, schemes=(ConvOut(), Inside), rules=(Doubled, Failing())
    )
    yield with_own
    with_own.close()


def offered(editor, layer):
    facts = editor._state["static"]["facts"]
    return facts["schemes"][facts["name"].index(layer)]


def test_schemes_are_offered_where_they_can_be_had(editor):
    assert offered(editor, "conv") == ["replicate", "ConvOut"]
    assert offered(editor, "relu") == []
    assert offered(editor, "fc")[-2:] == ["duplicate", "Inside"]


def test_a_choice_of_the_menu_is_the_scheme_and_back_again(editor):
    editor.edit("conv", "scheme", "ConvOut")
    assert editor.plan.layers["conv"].meant.takes(GRAPH["conv"])
    assert editor._model.columns["scheme"][0] == "ConvOut"
    assert "ConvOut" in editor.still()
    editor.edit("conv", "shares", "2 1")
    assert editor.plan.layers["conv"].shares == (2, 1)
    editor.edit("conv", "scheme", "replicate")
    assert editor.plan == wb.Plan.data_parallel(GRAPH, 2)
    editor.edit(["conv", "relu", "fc"], "scheme", "Inside")
    assert list(editor.plan.layers) == ["fc"]
    with pytest.raises(wb.PlanError, match="no scheme 'ConvIn'"):
        editor.edit("fc", "scheme", "ConvIn")


def test_it_is_predicted(editor):
    editor.edit("conv", "scheme", "ConvOut")
    assert editor.settle()
    assert editor.prediction is not None
    assert editor._model.values["predicted"]["totals"]["received_bytes"] > 0


def test_schemes_of_an_assigned_plan_are_offered_from_then_on():
    editor = wb.PlanEditor(GRAPH, world_size=2)
    messages = []
    editor.send = lambda content, *_: messages.append(content["type"])
    assert offered(editor, "conv") == []
    editor.plan = editor.plan.with_layer("conv", scheme=ConvOut())
    assert "state" in messages
    facts = editor._model.static["facts"]
    assert facts["schemes"][0] == ["replicate", "ConvOut"]
    messages.clear()
    editor.edit("conv", "shares", "1 2")
    assert "state" not in messages
    editor.close()


def test_installed_ones_are_offered_and_what_cannot_be_loaded_is_told(monkeypatch):
    def point(name, value, kind):
        return importlib.metadata.EntryPoint(name, value, f"workbench.{kind}")

    points = [
        point("conv", f"{HERE}:ConvOut", "schemes"),
        point("gone", "nowhere.at_all:Scheme", "schemes"),
        point("doubled", "tests.widgets.editor.test_offered:Doubled", "rules"),
    ]
    monkeypatch.setattr(
        "workbench.plan.extension.extension.entry_points",
        lambda group: [one for one in points if one.group == group],
    )
    editor = wb.PlanEditor(GRAPH, world_size=2)
    assert offered(editor, "conv") == ["replicate", "ConvOut"]
    assert [rule["name"] for rule in editor._state["static"]["rules"]][-1] == "Doubled"
    (note,) = editor._state["values"]["notes"]
    assert "scheme 'gone' is not offered" in note
    assert wb.Plan.data_parallel(GRAPH, 2).with_layer("conv", scheme="conv").layers["conv"].is_own
    editor.close()


def test_rules_make_plans(editor):
    menu = {rule["name"]: rule for rule in editor._state["static"]["rules"]}
    assert list(menu) == ["data parallel", "hybrid", "filters", "Doubled", "Failing"]
    assert menu["hybrid"]["grouped"]
    assert not menu["Doubled"]["grouped"]
    assert menu["Doubled"]["description"] == Doubled.description
    editor.preset("Doubled")
    assert list(editor.plan.layers) == ["fc", "out"]
    assert editor._model.values["last"] == "Doubled"


def test_a_rule_that_fails_changes_nothing_and_is_named(editor):
    before = editor.plan
    with pytest.raises(wb.PlanError, match="rule 'Failing': ZeroDivisionError"):
        editor.preset("Failing")
    assert editor.plan is before
    assert "rule 'Failing'" in editor.errors["preset"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(schemes=["shard_out"]), "is no scheme of your own"),
        (dict(schemes=[Doubled()]), "does not extend their base class"),
        (dict(rules=[ConvOut()]), "does not extend their base class"),
        (dict(rules=["best"]), "none of the rules is called 'best'"),
    ],
)
def test_what_is_none_is_refused(given, text):
    with pytest.raises(wb.PlanError, match=text):
        wb.PlanEditor(mlp(8, 4), **given)
