"""The staleness explorer without a browser."""

import pytest
import traitlets

import workbench as wb
from workbench.predict.closed_form import Compute, Network
from workbench.widgets.explorers.descent import GOALS, losses, steps_to
from workbench.widgets.explorers.stability import limit
from workbench.widgets.explorers.staleness import step_s


def test_figures_are_those_of_the_recurrence_and_of_the_timing_model(explore):
    explorer = explore(wb.StalenessExplorer, width=2, codec="int8", lr=0.3)
    rows = {(row[0], row[1]): row for row in explorer.picture().table.rows}
    own = rows["2", "int8"]
    steps = steps_to(losses(explorer.run), GOALS["quadratic"].loss)
    assert own[3] == str(steps)
    total = steps * step_s(explorer.run, explorer.model)
    assert own[5] == f"{total:.2f} s"
    assert float(own[2]) == pytest.approx(limit(2), rel=1e-2)
    assert float(rows["1", "none"][6].rstrip("×")) == 1


def test_r_is_communication_over_compute(explore):
    explorer = explore(wb.StalenessExplorer, r=0.25)
    assert explorer.model.r() == pytest.approx(0.25)
    explorer.r = 4.0
    assert explorer.model.r() == pytest.approx(4.0)
    slow = wb.TimingModel(4, 1e6, Compute(0.0, 0.01, 0.02), Network(1e9, 0.1))
    other = explore(wb.StalenessExplorer, slow)
    assert other.r == pytest.approx(slow.r())
    other.r = 0.01
    assert "all but the transfer takes" in other.errors[""]
    assert other.drawing.shown["panels"]  # the last one stays
    other.r = 100.0
    assert other.errors == {}


def test_steps_that_diverge_are_told(explore):
    explorer = explore(wb.StalenessExplorer, width=4, codec="none", lr=0.5)
    assert "steps diverge" in explorer.picture().said[0]
    legend = {entry.label: entry.value for entry in explorer.picture().panels[0].legend}
    assert legend["width 4"] == "diverges"
    assert legend["synchronous"] != "diverges"
    explorer.width = 1
    assert [entry.label for entry in explorer.picture().panels[0].legend] == ["synchronous"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", 0), ("codec", "zip"), ("lr", 0.0), ("momentum", 1.0), ("condition", 0.5), ("r", -1)],
)
def test_values_that_cannot_be(explore, name, value):
    explorer = explore(wb.StalenessExplorer)
    with pytest.raises(traitlets.TraitError):
        setattr(explorer, name, value)


def test_only_timing_models():
    with pytest.raises(TypeError, match=r"takes a wb.TimingModel, .* got str"):
        wb.StalenessExplorer("fast")
    with pytest.raises(TypeError, match=r"with a machine, .* takes an experiment"):
        wb.StalenessExplorer(wb.Machine.preset("h100-nvlink"))


@pytest.mark.slow
def test_digits_on_a_machine(explore, prediction):
    machine, experiment = prediction.machine, prediction.experiment
    explorer = explore(wb.StalenessExplorer, machine, experiment, loss="digits")
    assert explorer.r == pytest.approx(explorer.model.r())
    assert explorer.model.workers == experiment.plan.world_size
    shown = explorer.drawing.shown
    assert explorer.children[0].children == tuple(explorer.controls.values())
    assert "condition" not in explorer.controls
    explorer.loss = "quadratic"
    assert explorer.controls["condition"] in explorer.children[0].children
    assert shown["said"][0].startswith("On a quadratic loss, a guide here:")
    assert "Digits that are recognised at the end, synchronous: 9" in shown["said"][2]
    assert shown["table"]["caption"] == "To a fifth of the loss"
