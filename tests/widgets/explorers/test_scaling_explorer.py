"""The scaling explorer without a browser: its curves are the prediction's."""

import pytest
import traitlets

import workbench as wb
from tests.plan import graphs
from tests.widgets.explorers.conftest import MACHINE, predicted
from workbench.widgets.explorers.scaling import dominates_at, sizes_of


def settled(explorer):
    assert explorer.settle()
    return explorer


def test_curves_are_the_prediction_s_up_to_65_536_ranks(explore, prediction):
    explorer = settled(explore(wb.ScalingExplorer, prediction, world_size=1024))
    assert (explorer.sizes[0], explorer.sizes[-1]) == (4, 65536)
    assert [p.world_size for p in explorer.curves["strong"]] == list(explorer.sizes)
    some = [4, 64]
    for kind, curve in (
        ("strong", prediction.strong_scaling(some)),
        ("weak", prediction.weak_scaling(some)),
    ):
        found = {point.world_size: point for point in explorer.curves[kind]}
        assert [found[size] for size in some] == list(curve.points)
    assert explorer.drawing.shown["busy"] == ""
    said = " ".join(explorer.drawing.shown["said"])
    assert "on 1,024 ranks a step of 64 samples" in said
    at = dominates_at(explorer.curves["strong"])
    assert f"Strong: communication and waiting take more than work from {at:,} ranks on" in said


@pytest.mark.slow
def test_other_links_and_devices(explore, prediction):
    explorer = settled(explore(wb.ScalingExplorer, prediction))
    before = explorer.curves["strong"]
    explorer.link = "cpu-1gbe"
    settled(explorer)
    slower = explorer.curves["strong"]
    assert slower[8].step_time > before[8].step_time
    assert slower[8] == prediction.at(link="cpu-1gbe").strong_scaling([explorer.sizes[8]]).points[0]
    explorer.controls["device"].value = "t4-pcie"
    settled(explorer)
    assert explorer.curves["strong"][0].work_s > slower[0].work_s


def test_sizes_keep_the_groups():
    graph = graphs.vgg()
    assert sizes_of(wb.Plan.data_parallel(graph, 6))[:3] == (3, 6, 12)
    assert sizes_of(wb.Plan.hybrid(graph, 8, 2))[:3] == (2, 4, 8)


def test_without_a_machine_it_says_how_to_get_one(explore, prediction):
    run = prediction.experiment
    explorer = settled(explore(wb.ScalingExplorer, wb.predict(run.plan, None, run)))
    assert "time needs a machine" in explorer.errors[""]
    explorer.prediction = prediction
    settled(explorer)
    assert explorer.errors == {}
    assert explorer.drawing.shown["panels"]


def test_a_measured_machine_has_its_first_device_everywhere(explore, prediction):
    measured = MACHINE.replace(devices=MACHINE.devices * 4)
    plan = prediction.experiment.plan
    explorer = settled(
        explore(wb.ScalingExplorer, wb.predict(plan, measured, prediction.experiment))
    )
    assert explorer.curves["strong"][3].world_size == 32
    assert "All ranks are taken to be as rank 0" in " ".join(explorer.drawing.shown["said"])


@pytest.mark.parametrize(
    ("name", "value"), [("world_size", 5), ("link", "string"), ("device", "x")]
)
def test_values_that_cannot_be(explore, prediction, name, value):
    explorer = explore(wb.ScalingExplorer, prediction)
    with pytest.raises(traitlets.TraitError):
        setattr(explorer, name, value)


@pytest.mark.slow
def test_another_prediction_keeps_a_size_that_it_has(explore, prediction):
    explorer = settled(explore(wb.ScalingExplorer, prediction, world_size=64))
    explorer.prediction = predicted(wb.Plan.data_parallel(graphs.vgg(), 6))
    settled(explorer)
    assert explorer.world_size == 6
    assert explorer.curves["weak"][0].world_size == 3
