"""The editor without a browser: the plan it has is the plan that everybody has."""

import threading

import pytest
import traitlets

import workbench as wb
from tests.plan import graphs
from tests.widgets.editor.kit import MACHINE, Seen, residual
from workbench.widgets.editor.state import Snapshot

VGG = graphs.vgg()
HYBRID = wb.Plan.hybrid(VGG, 4)


def place(name, graph=VGG):
    return [layer.name for layer in graph.layers].index(name)


def ask(editor, **content):
    editor._handle_custom_msg(content, [])


def test_a_graph_begins_as_data_parallel(edit):
    assert edit(VGG).plan == wb.Plan.data_parallel(VGG, 4)
    assert edit(VGG, world_size=6).plan.world_size == 6
    experiment = wb.Experiment(
        plan=HYBRID.with_world_size(8), data="digits", optimizer=wb.SGD(lr=1), steps=1
    )
    assert edit(VGG, None, experiment).plan.world_size == 8
    two = MACHINE.replace(devices=MACHINE.devices * 2)
    assert edit(VGG, two).plan.world_size == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("vgg11",), "a Graph or a Plan, got str"), ((VGG, "h100"), "Machine, a Cluster, a Run")],
)
def test_what_it_cannot_show(arguments, reason):
    with pytest.raises(TypeError, match=reason):
        wb.PlanEditor(*arguments)


def test_what_is_edited_is_the_plan_and_is_observed(edit):
    editor = edit(HYBRID, MACHINE)
    heard = []
    editor.observe(lambda change: heard.append((change["old"], change["new"])), "plan")
    ask(editor, type="edit", layers=[place("fc0"), place("fc1")], field="group", value=2)
    expected = HYBRID.with_layer("fc0", group_size=2).with_layer("fc1", group_size=2)
    assert editor.plan == expected
    assert heard == [(HYBRID, expected)]


def test_what_is_assigned_is_shown(edit):
    editor = edit(HYBRID, MACHINE)
    seen = Seen(editor)
    plan = wb.Plan.data_parallel(VGG, 4).with_layer("conv", scheme="duplicate")
    editor.plan = plan
    assert editor.settle()
    assert editor.plan is plan
    assert seen.state.columns["scheme"][place("conv")] == "duplicate"
    assert seen.state.values["undo"] == "assigned"
    assert seen.state.values["predicted"]["totals"]["step_s"] == editor.prediction.step_time


def test_views_are_sent_a_state_once_and_then_what_changed(edit):
    editor = edit(residual(12), MACHINE)
    seen = Seen(editor)
    editor.settle()
    seen.messages.clear()
    editor.edit("head", "scheme", "shard_out")
    editor.settle()
    choices, *_ = seen.messages
    head = place("head", editor.plan.graph)
    assert choices["columns"]["scheme"] == [[head], ["shard_out"]]
    assert all(len(at) < 12 for m in seen.messages for name, (at, _) in m["columns"].items())
    whole = editor._model.state()
    assert seen.state == Snapshot(whole["columns"], whole["values"])


def test_an_edit_that_cannot_be_marks_its_cell_and_keeps_the_plan(edit):
    editor = edit(HYBRID, MACHINE)
    seen = Seen(editor)
    ask(editor, type="edit", layers=[place("fc0")], field="shares", value="3 1")
    assert editor.plan is HYBRID
    reason = "layer 'fc0': 2 shares (3, 1) for a group of 4 ranks"
    assert editor.errors == {f"{place('fc0')}:shares": reason} == seen.state.values["errors"]
    with pytest.raises(wb.PlanError, match="2 shares"):
        editor.edit("fc0", "shares", "3 1")
    editor.edit("fc0", "shares", "3 1 1 1")
    assert editor.errors == {}
    assert editor.plan == HYBRID.with_layer("fc0", shares=(3, 1, 1, 1))


@pytest.mark.parametrize(
    ("message", "place_"),
    [
        ({"type": "plan", "field": "world_size", "value": "6"}, "world_size"),
        ({"type": "plan", "field": "rows", "value": "1 x"}, "rows"),
        ({"type": "batch_size", "value": 0}, "batch_size"),
        ({"type": "preset", "name": "hybrid", "group": 3}, "preset"),
    ],
)
def test_what_the_plan_cannot_be_marks_its_field(edit, message, place_):
    editor = edit(HYBRID)
    ask(editor, **message)
    assert list(editor.errors) == [place_]
    assert editor.plan is HYBRID
    ask(editor, type="plan", field="rounds", value="B")
    assert editor.errors == {}
    assert editor.plan.rounds == "B"


def test_undo_and_redo(edit):
    editor = edit(HYBRID)
    one = editor.edit("fc0", "group", 2)
    two = editor.edit_plan("world_size", 8)
    assert editor.undo() is one
    assert editor._model.values["redo"] == "world size: 8"
    assert editor.undo() is HYBRID
    assert editor.undo() is HYBRID
    assert editor.redo() is one
    assert editor.redo() is two
    assert editor.redo() is two
    editor.undo()
    three = editor.edit("fc1", "recompute", True)
    assert editor._model.values["redo"] is None
    assert editor.undo() is one
    assert editor.redo() is three


def test_what_an_edit_changed_elsewhere_is_told(edit):
    editor = edit(wb.Plan.data_parallel(VGG, 4), MACHINE)
    editor.edit("fc0", "scheme", "shard_out")
    values = editor._model.values
    assert values["edited"] == [place("fc0")]
    also = {VGG.layers[i].name for i in values["also"]}
    assert "avgpool" in also  # its rows are gathered there
    assert "conv" not in also


def test_the_difference_is_to_the_plan_before_the_edit(edit):
    editor = edit(wb.Plan.data_parallel(VGG, 4), MACHINE)
    editor.settle()
    first = editor._model.values["predicted"]["totals"]
    assert editor._model.values["predicted"]["before"] is None
    editor.preset("hybrid")
    editor.settle()
    predicted = editor._model.values["predicted"]
    assert predicted["before"] == first != predicted["totals"]
    editor.machine = MACHINE.replace(name="another")
    editor.settle()
    assert editor._model.values["predicted"]["before"] is None  # cannot be compared


def test_experiment_and_machine_are_assignable(edit):
    editor = edit(HYBRID)
    editor.settle()
    assert editor.prediction.machine is None
    assert "needs a machine" in editor._model.values["can"]["suggest"]
    editor.machine = MACHINE
    ask(editor, type="batch_size", value=64)
    editor.settle()
    assert editor.experiment.batch_size == 64
    assert editor.prediction.experiment.batch_size == 64
    assert editor.prediction.machine is MACHINE
    assert editor._model.values["can"]["suggest"] == ""


def test_what_cannot_be_predicted_is_told_and_the_plan_stays_editable(edit):
    editor = edit(HYBRID.with_world_size(8), MACHINE.replace(devices=MACHINE.devices * 4))
    editor.settle()
    assert "4 devices" in editor._model.values["complaint"]
    assert editor.prediction is None
    editor.edit_plan("world_size", 4)
    editor.settle()
    assert editor._model.values["complaint"] == ""
    assert editor.prediction.step_time > 0


def test_figures_of_another_rank(edit):
    editor = edit(HYBRID.with_rows((3, 1, 1, 1)), MACHINE)
    ask(editor, type="rank", rank=2)
    editor.settle()
    assert editor._model.values["predicted"]["rank"] == 2
    ask(editor, type="rank", rank=None)
    editor.settle()
    assert editor._model.values["predicted"]["rank"] == 0


def test_two_editors_on_one_plan_are_independent_unless_linked(edit):
    one, two = edit(HYBRID, MACHINE), edit(HYBRID)
    one.edit("fc0", "group", 2)
    assert two.plan is HYBRID
    link = traitlets.link((one, "plan"), (two, "plan"))
    assert two.plan is one.plan
    two.edit("fc1", "group", 2)
    assert one.plan is two.plan
    one.undo()
    assert two.plan is one.plan
    link.unlink()


def test_linked_editors_edited_on_two_threads_at_once(edit):
    one, two = edit(HYBRID, MACHINE), edit(HYBRID, MACHINE)
    link = traitlets.link((one, "plan"), (two, "plan"))

    def work(editor, layer):
        for size in (2, 4) * 5:
            editor.edit(layer, "group", size)
        editor.edit(layer, "recompute", True)

    jobs = [(one, "fc0"), (two, "fc1"), (one, "fc1"), (two, "fc0")]
    threads = [threading.Thread(target=work, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert one.plan is two.plan
    assert one.plan == HYBRID.with_recompute("fc0", "fc1")
    link.unlink()


def test_another_model_begins_anew(edit):
    editor = edit(HYBRID, MACHINE)
    seen = Seen(editor)
    editor.plan = wb.Plan.hybrid(graphs.transformer(), 2)
    editor.settle()
    assert seen.messages[0]["type"] == "state"
    assert seen.messages[0]["state"]["static"]["facts"]["name"][0] == "embed"
    assert len(seen.state.columns["memory"]) == len(editor.plan.graph.layers)
    assert seen.state.values["undo"] is None


def test_a_view_that_comes_late_asks_for_everything(edit):
    editor = edit(HYBRID)
    editor.edit("fc0", "group", 2)
    seen = Seen(editor)
    ask(editor, type="hello")
    assert seen.state.columns["group"][place("fc0")] == 2


def test_a_message_that_makes_no_sense_is_told(edit):
    editor = edit(HYBRID)
    ask(editor, type="dance")
    assert editor._model.values["tasks"]["editor"]["state"] == "failed"
    assert editor.plan is HYBRID


def test_many_layers(edit):
    editor = edit(graphs.mlp(*[4] * 1001), world_size=2)
    seen = Seen(editor)
    editor.edit("fc7", "scheme", "shard_out")
    assert seen.state.columns["scheme"][place("fc7", editor.plan.graph)] == "shard_out"
    assert len(editor.plan.graph.layers) == 1999
