"""Suggest, verify, measure, apply, save and load; and that their failures are told."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.widgets.editor.kit import MACHINE, FakeCluster, FakeRun, searched
from workbench.widgets.editor import target

VGG = graphs.vgg()
HYBRID = wb.Plan.hybrid(VGG, 4)
NAMED = HYBRID.to_toml().replace('scheme = "shard_out"', 'scheme = "antigravity:Scheme"')


def ask(editor, **content):
    editor._handle_custom_msg(content, [])
    assert editor.settle(timeout=300)
    return editor._model.values["tasks"].get(content["type"])


@pytest.mark.slow
def test_suggested_plans_can_be_taken_and_undone(edit):
    small = graphs.Builder((3, 8, 8)).conv("conv", 8).graph()
    editor = edit(wb.Plan.filters(small, 2), MACHINE)
    before = editor.plan
    found = ask(editor, type="suggest", limit="")
    assert found["state"] == "done"
    times = [point["step_s"] for point in found["points"]]
    assert times == sorted(times)
    ask(editor, type="take", index=0)
    assert editor.prediction.step_time == times[0]
    assert editor._model.values["last"].startswith("suggested: ")
    assert editor.undo() is before


def test_a_limit_that_nothing_meets_offers_the_leanest_plan(edit, monkeypatch):
    monkeypatch.setattr(target, "search", searched)
    editor = edit(VGG, MACHINE)
    found = ask(editor, type="suggest", limit="10kB")
    assert found["points"][0]["step_s"] is None
    assert "needs" in found["text"]
    ask(editor, type="take", index=0)
    assert editor.prediction.memory.peak_bytes == found["points"][0]["peak"]


def test_a_limit_that_is_none(edit):
    found = ask(edit(VGG, MACHINE), type="suggest", limit="much")
    assert found["state"] == "failed"
    assert "memory_limit must be" in found["text"]
    assert found["advice"]


def test_verify(edit):
    cluster = FakeCluster()
    editor = edit(HYBRID, cluster, module="mine")
    found = ask(editor, type="verify")
    assert found["state"] == "done"
    assert found["good"]
    assert found["text"].startswith("Exact: 1 tensors of fp64")
    assert cluster.verified == [(HYBRID, {"module": "mine"})]


def test_a_cluster_begins_a_graph_and_measures_the_machine(edit):
    editor = edit(VGG, FakeCluster(3))
    assert editor.plan.world_size == 3
    editor.settle()
    assert {rank["limit"] for rank in editor._model.values["predicted"]["ranks"]} == {2**30}
    assert ask(editor, type="measure")["state"] == "done"
    assert editor.machine is MACHINE
    assert editor.prediction.step_time > 0


@pytest.mark.parametrize("error", [RuntimeError("rank 2 failed"), RuntimeError()])
def test_what_fails_is_told_with_what_to_do(edit, error):
    found = ask(edit(HYBRID, FakeCluster(error=error)), type="verify")
    assert found["state"] == "failed"
    assert found["text"] == (str(error) or "RuntimeError")
    assert "editor.cluster" in found["advice"]


@pytest.mark.parametrize("what", ["verify", "measure", "apply", "suggest"])
def test_what_it_lacks_is_told(edit, what):
    editor = edit(HYBRID)
    assert "wb.PlanEditor(plan, " in editor._model.values["can"][what]
    assert ask(editor, type=what)["state"] == "failed"


def test_what_is_assigned_later_can_be_had(edit):
    editor = edit(HYBRID)
    editor.cluster = FakeCluster()
    assert editor._model.values["can"]["verify"] == ""
    assert ask(editor, type="verify")["state"] == "done"
    assert "editor.run" in editor._model.values["can"]["apply"]


def test_apply_to_a_run(edit):
    run = FakeRun(
        wb.Experiment(plan=HYBRID, data="digits", optimizer=wb.SGD(lr=0.1), steps=9, batch_size=12)
    )
    editor = edit(run.experiment.plan, run)
    assert editor.experiment is run.experiment
    plan = editor.edit("fc0", "group", 2)
    found = ask(editor, type="apply")
    assert run.plans == [plan]
    assert found["good"]
    assert "2.0 MB" in found["text"]


def test_save_and_load(edit, tmp_path):
    path = tmp_path / "plan.toml"
    editor = edit(HYBRID)
    assert str(path) in ask(editor, type="save", path=str(path))["text"]
    assert wb.Plan.load(path) == HYBRID
    editor.preset("data parallel")
    ask(editor, type="load", path=f" {path} ")
    assert editor.plan == HYBRID
    assert editor._model.values["last"] == "loaded plan.toml"


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("", None, "no file was named"),
        ("absent.toml", None, "absent.toml"),
        ("bad.toml", "what?", "not TOML"),
        ("named.toml", NAMED, "was not imported: read the text with trust=True"),
        ("other.toml", wb.Plan.hybrid(graphs.mlp(4, 4, 2), 2).to_toml(), "this plan is for"),
    ],
)
def test_files_that_cannot_be_loaded(edit, tmp_path, monkeypatch, path, text, reason):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / path).write_text(text)
    editor = edit(HYBRID)
    found = ask(editor, type="load", path=path)
    assert found["state"] == "failed"
    assert reason in found["text"]
    assert editor.plan is HYBRID
