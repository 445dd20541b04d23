"""What is left of an editor where no kernel runs."""

import re

import workbench as wb
from tests.plan import graphs
from tests.plan.graphs import Builder
from tests.widgets.editor.kit import MACHINE
from workbench.widgets.editor.rows import runs
from workbench.widgets.editor.still import devices_svg

HYBRID = wb.Plan.hybrid(graphs.vgg(), 4)


def test_a_table_and_a_picture_without_scripts(edit):
    editor = edit(HYBRID, MACHINE)
    editor.settle()
    data, _ = editor._repr_mimebundle_()
    text = data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in data
    assert '<img alt="Plan of Toy on 4 ranks' in text
    assert "<script" not in text
    assert "<svg" not in text  # untrusted notebooks show it as an image only
    assert "all_gather_rows over 4 of pool" in text
    assert "samples/s" in text
    assert data["text/plain"] == repr(editor)
    assert repr(editor).startswith("<PlanEditor: <Plan Toy on 4 ranks")


def test_over_budget_is_said_in_words(edit):
    device = MACHINE.device(0).replace(memory_bytes=1000)
    editor = edit(HYBRID, MACHINE.replace(devices=(device,)))
    editor.settle()
    assert ">over<" in editor.still()


def test_names_are_escaped_and_shortened(edit):
    name = "<b>" + "n" * 200
    editor = edit(Builder((4,)).linear(name, 4).graph())
    assert "<b>n" not in editor.still()
    assert "&lt;b&gt;nnn" in editor.still()
    assert "n" * 100 not in editor.still()


def test_displays_are_brought_up_to_date_when_no_edit_follows(edit, monkeypatch):
    updates = []

    class Handle:
        def update(self, data, **_):
            updates.append(data["text/html"])

    monkeypatch.setattr("workbench.widgets.base.widget.display", lambda *_, **__: Handle())
    editor = edit(HYBRID, MACHINE)
    editor._ipython_display_()
    editor.preset("data parallel")
    editor.settle()
    editor.keep()
    assert "shard_out" not in re.sub(r"<img[^>]*>", "", updates[-1])


def test_pieces_are_to_scale():
    plan = HYBRID.with_layer("fc0", scheme="shard_out", shares=(3, 1, 0, 0))
    found = {run.first: run for run in runs(plan)}
    assert found["fc0"].held == (3 * 785 * 16, 785 * 16, 0, 0)
    assert sum(run.parameters for run in found.values()) == plan.graph.parameters
    assert "rank 3" in devices_svg(plan)
    assert "and 12 more ranks" in devices_svg(plan.with_world_size(28))
