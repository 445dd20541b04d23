"""The timing explorer without a browser: what it says is what the model says."""

import re
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import traitlets
from ipywidgets import Widget

import workbench as wb
from tests.plan import graphs
from tests.widgets.explorers.conftest import MACHINE
from workbench.plan.extension import extension
from workbench.predict.closed_form import fastest
from workbench.widgets.explorers.timing import strategies


@pytest.mark.slow
def test_the_fastest_is_the_model_s(explore):
    explorer = explore(wb.TimingExplorer, world_size=16, bandwidth=1e8, codec="int8", width=2)
    systems = strategies(2, explorer._codec)
    best = fastest(explorer.model(), systems)
    picture = explorer.picture()
    assert f"16 workers {best} is the fastest" in picture.said[0]
    assert picture.table.rows[0][0] == best
    assert {entry.label for entry in picture.panels[0].legend} == set(systems)


def test_a_view_finds_a_picture_when_the_way_to_it_opens(explore, monkeypatch):
    opened = []

    def opens(widget):
        if widget.has_trait("_view"):
            opened.append(widget.get_state("_view"))

    monkeypatch.setattr(Widget, "open", opens)
    explorer = explore(wb.TimingExplorer)
    assert opened == [{"_view": explorer.drawing.shown}]
    assert explorer.drawing.shown


@pytest.mark.slow
def test_every_control_is_an_attribute_that_is_shown(explore):
    explorer = explore(wb.TimingExplorer)
    for control in explorer.moves()[:6]:
        before = explorer.drawing.shown
        widget = explorer.controls[control.name]
        assert control.value(widget) == getattr(explorer, control.name)
        widget.value = control.values[5]
        assert getattr(explorer, control.name) == control.values[5]
        assert explorer.drawing.shown != before
    explorer.controls["codec"].value = "none"
    assert explorer.codec is None
    assert not any("int8" in row[0] for row in explorer.picture().table.rows)


def test_what_is_assigned_is_shown_and_observed(explore):
    explorer = explore(wb.TimingExplorer)
    heard = []
    explorer.observe(lambda change: heard.append(change["new"]), "bandwidth")
    sent = []
    explorer.drawing.send = lambda content, buffers=(): sent.append(content)
    explorer.bandwidth = 3.3e9  # between two places of the slider
    assert explorer.controls["bandwidth"].label == "26.4 Gbit/s"
    assert heard == [3.3e9]
    assert "26.4 Gbit/s" in sent[-1]["view"]["title"]
    explorer.bandwidth = 3.3e9
    assert len(sent) == 1


def test_width_one_is_synchronous(explore):
    explorer = explore(wb.TimingExplorer, width=1, codec=None)
    assert not any("pipelined" in row[0] for row in explorer.picture().table.rows)


@pytest.mark.slow
def test_links_of_the_machine_are_marked_and_can_be_taken(explore):
    explorer = explore(wb.TimingExplorer, MACHINE)
    assert explorer.bandwidth == MACHINE.across.bandwidth
    said = " ".join(explorer.picture().said)
    assert "h100-infiniband, between hosts" in said
    assert "h100-infiniband, within a host" in said
    explorer.bandwidth = 1e7
    explorer.controls["machine"].click()
    assert explorer.bandwidth == MACHINE.across.bandwidth
    alone = MACHINE.replace(across=None, ranks_per_host=None)
    explorer.machine = alone
    assert "between hosts" not in " ".join(explorer.picture().said)


def test_without_a_machine_the_button_says_what_is_missing(explore):
    explorer = explore(wb.TimingExplorer)
    assert explorer.controls["machine"].disabled
    assert "explorer.machine = machine" in explorer.controls["machine"].tooltip
    explorer.controls["machine"].click()
    assert "no machine" in explorer.errors["moved"]


def test_an_experiment_gives_gradient_workers_and_compute(explore):
    plan = wb.Plan.data_parallel(graphs.vgg(), 4)
    run = wb.Experiment(plan=plan, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=3)
    explorer = explore(wb.TimingExplorer, MACHINE, run)
    assert explorer.world_size == 4
    assert explorer.gradient_bytes == 4 * sum(layer.parameters for layer in plan.graph.layers)
    work = float(wb.predict(plan, MACHINE, run).timeline.work.mean())
    assert explorer.compute_s == pytest.approx(work)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 0), ("bandwidth", -1.0), ("bandwidth", float("inf")), ("latency_s", 0.0),
        ("compute_s", float("nan")), ("width", 0), ("codec", "zip"), ("gradient_bytes", 0.0),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_and_nothing_changes(explore, name, value):
    explorer = explore(wb.TimingExplorer)
    before, shown = getattr(explorer, name), explorer.drawing.shown
    with pytest.raises(traitlets.TraitError, match=re.escape(name)):
        setattr(explorer, name, value)
    assert getattr(explorer, name) == before
    assert explorer.drawing.shown is shown


@pytest.mark.slow
def test_what_is_moved_in_vain_is_said_above_the_pictures(explore):
    explorer = explore(wb.TimingExplorer)
    width = explorer.controls["width"]
    width.min = 0
    width.value = 0
    assert "width must be a positive integer, got 0" in explorer.errors["moved"]
    assert "positive integer" in explorer.drawing.shown["error"]
    assert (explorer.width, width.value) == (2, 2)
    width.value = 3
    assert explorer.errors == {}
    explorer.drawing._receive(explorer.drawing, {"type": "paint"}, [])
    assert "no 'paint' to do" in explorer.errors["moved"]


def test_only_machines_and_experiments(explore):
    with pytest.raises(TypeError, match=r"takes a Machine or None, got str"):
        wb.TimingExplorer("h100-nvlink")
    with pytest.raises(TypeError, match=r"wb.Experiment"):
        wb.TimingExplorer(MACHINE, "vgg")


def test_a_still_picture_stays(explore):
    explorer = explore(wb.TimingExplorer, MACHINE.replace(name="<b>mine</b>" + "x" * 200))
    still = explorer._repr_mimebundle_()[0]["text/html"]
    assert still.count("<img") == 2
    assert "<b>mine" not in still
    assert "In figures" in still
    assert repr(explorer).startswith("<TimingExplorer: world_size=8, bandwidth=")


@pytest.mark.slow
def test_installed_codecs_are_offered(explore, monkeypatch):
    point = EntryPoint("sign", "tests.own_sums:Sign", "workbench.codecs")
    offered = {"workbench.codecs": EntryPoints([point])}
    monkeypatch.setattr(extension, "entry_points", lambda group: offered[group])
    explorer = explore(wb.TimingExplorer, codec="sign", width=2)
    assert "pipelined, width 2, Sign" in strategies(2, explorer._codec)
    assert "sign" in explorer.controls["codec"].options
    assert {"pipelined, width 2, Sign"} <= {e.label for e in explorer.picture().panels[0].legend}
