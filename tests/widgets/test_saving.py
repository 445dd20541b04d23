"""What widgets show is a table and a file, also where no browser is."""

import xml.etree.ElementTree as ElementTree

import pandas
import pytest

import workbench as wb
from tests.plan import graphs
from workbench.predict.closed_form import Compute, Network

MACHINE = wb.Machine.preset("h100-infiniband")
PLAN = wb.Plan.hybrid(graphs.vgg(), 4)
PREDICTION = wb.predict(PLAN, MACHINE)
MODEL = wb.TimingModel(4, 240e6, Compute(0.03, 0.08, 0.17), Network("10gbit", latency_s=5e-5))
WIDGETS = {
    "editor": lambda: wb.PlanEditor(PLAN, MACHINE),
    "editor of an experiment": lambda: wb.PlanEditor(PREDICTION.experiment, MACHINE),
    "timing": lambda: wb.TimingExplorer(MACHINE),
    "staleness": lambda: wb.StalenessExplorer(),
    "memory": lambda: wb.MemoryMap(PREDICTION),
    "traffic": lambda: wb.TrafficMatrix(PREDICTION),
    "scaling": lambda: wb.ScalingExplorer(PREDICTION),
    "timing chart": lambda: wb.TimingChart(
        MODEL, {"D-Sync": wb.Synchronous(algorithm="ring")}, 1e7, 1e9
    ),
}


@pytest.mark.parametrize("name", WIDGETS)
def test_it_is_saved(name, tmp_path):
    widget = WIDGETS[name]()
    assert isinstance(widget.to_frame(), pandas.DataFrame)
    for ending in ("html", "csv"):
        widget.save(tmp_path / f"x.{ending}")
    if name != "scaling":  # a table
        widget.save(tmp_path / "x.svg")
        assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert "<body>" in (tmp_path / "x.html").read_text("utf-8")
    with pytest.raises(ValueError, match=r"got 'x\.pdf'"):
        widget.save(tmp_path / "x.pdf")
    getattr(widget, "close", lambda: None)()


def test_a_network_takes_text_with_a_unit():
    assert Network("10gbit").bandwidth == 1.25e9
    with pytest.raises(wb.MachineError, match="Network: a bandwidth is a number of bytes/s"):
        Network("10 parsecs")
    link = wb.Machine.preset("cpu-1gbe").across.replace(bandwidth="2.5gbit")
    assert link.bandwidth == 312.5e6


def test_the_bound_of_a_pipeline_s_gain():
    r = MODEL.r()
    assert MODEL.gain_bound() == (1 + r) / max(1, r)
