"""What a notebook shows is saved as a picture, a page or a table."""

import xml.etree.ElementTree as ElementTree

import pandas
import pytest

import workbench as wb
from tests.plan import graphs
from workbench.plan.display import svg
from workbench.plan.io.html import save

MACHINE = wb.Machine.preset("h100-nvlink")
PLAN = wb.Plan.hybrid(graphs.vgg(), 2)
EXPERIMENT = wb.Experiment(plan=PLAN, data="digits", optimizer="sgd", steps=3)
PREDICTION = wb.predict(PLAN, MACHINE)
SHOWN = {
    "graph": PLAN.graph,
    "plan": PLAN,
    "experiment": EXPERIMENT,
    "machine": MACHINE,
    "program": wb.program(PLAN),
    "program of a rank": wb.program(PLAN).of(1),
    "prediction": PREDICTION,
    "prediction without a machine": wb.predict(PLAN),
    "memory": PREDICTION.memory,
    "traffic": PREDICTION.traffic,
    "timeline": PREDICTION.timeline,
    "scaling": PREDICTION.strong_scaling([2, 4]),
    "search": wb.search(PLAN, MACHINE),
    "balanced": wb.balanced(wb.Plan.data_parallel(PLAN.graph, 2), MACHINE),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_a_table_and_a_file(name, tmp_path):
    shown = SHOWN[name]
    frame = shown.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame)
    for ending in ("html", "csv"):
        shown.save(tmp_path / f"x.{ending}")
    page = (tmp_path / "x.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert shown._repr_html_() in page
    assert len(pandas.read_csv(tmp_path / "x.csv")) == len(frame)
    with pytest.raises(ValueError, match=r"is saved as .*\.html or .csv, got 'x.png'"):
        shown.save(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_values_are_still_saved_as_text(tmp_path):
    PLAN.save(tmp_path / "plan.toml")
    assert wb.Plan.load(tmp_path / "plan.toml") == PLAN
    MACHINE.save(tmp_path / "machine")
    assert wb.Machine.load(tmp_path / "machine") == MACHINE
    EXPERIMENT.save(tmp_path / "experiment.toml")
    assert wb.Experiment.load(tmp_path / "experiment.toml") == EXPERIMENT


def test_an_ending_means_the_same_in_any_case(tmp_path):
    PLAN.save(tmp_path / "x.SVG")
    assert ElementTree.parse(tmp_path / "x.SVG").getroot().tag.endswith("}svg")


def test_figures_are_plain_numbers():
    frame = PREDICTION.to_frame()
    assert list(frame["rank"]) == [0, 1]
    assert frame["step_s"].max() <= PREDICTION.step_time * (1 + 1e-9)
    parts = [name for name in frame if name.endswith("_s") and name != "step_s"]
    assert frame[parts].sum(axis=1).tolist() == pytest.approx(frame["step_s"].tolist())
    assert frame["peak_bytes"].max() == PREDICTION.memory.peak_bytes
    assert frame["received_bytes"].max() == PREDICTION.traffic.most_received_bytes
    plan = PLAN.to_frame().set_index("layer")
    held = sum(plan["most_held"])
    assert held >= PLAN.parameters_of(0)
    assert plan["parameters"].sum() == PLAN.graph.parameters
    assert PLAN.graph.to_frame()["flops"].sum() == PLAN.graph.flops


def test_pictures_below_each_other():
    one = svg.document([svg.rect(0, 0, 10, 20)], 100, 50, style="max-width:100%")
    root = ElementTree.fromstring(svg.stacked([one, one]))
    inner = [each for each in root if each.tag.endswith("svg")]
    assert [(each.get("x"), each.get("y")) for each in inner] == [("14", "14"), ("14", "78")]
    assert root.get("viewBox") == "0 0 128 142"


def test_an_index_with_a_name_is_a_column(tmp_path):
    class Named:
        def to_frame(self):
            return pandas.DataFrame({"loss": [1.0]}, index=pandas.Index(["a"], name="run"))

        def _repr_html_(self):
            return "<p>Named</p>"

    save(Named(), tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "run,loss\na,1.0\n"
