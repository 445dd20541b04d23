"""Charts are pictures that any notebook shows, and say the same in words."""

import base64
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pandas

import workbench as wb
from workbench.predict.closed_form import ONCE, Compute, Network

MODEL = wb.TimingModel(4, 240e6, Compute(0.03, 0.08, 0.17), Network(1.25e9, latency_s=5e-5))
SYSTEMS = {
    "PS-Sync": wb.ParameterServer(),
    "D-Sync": ONCE,
    "Pipe-SGD": wb.Pipelined(algorithm="ring"),
    "Pipe-SGD int8": wb.Pipelined(algorithm="ring", codec="int8"),
}
CHART = wb.TimingChart(MODEL, SYSTEMS, 1.25e7, 1.25e10, measured={"D-Sync": [(1.25e8, 3.2)]})


def test_a_line_for_each_system_and_a_circle_for_each_run():
    picture = ElementTree.fromstring(CHART.svg())
    lines = [p for p in picture.findall(".//{*}path") if p.get("stroke-width") == "2"]
    assert len(lines) == len(SYSTEMS)
    (circle,) = picture.findall(".//{*}circle")
    x, y = float(circle.get("cx")), float(circle.get("cy"))
    # The run lies where the model of its system does, to the pixels that 3 % are.
    assert MODEL.at(bandwidth=1.25e8).step_s() - 3.2 < 0.1
    points = re.findall(r"([\d.]+) ([\d.]+)", lines[1].get("d"))
    nearest = min(points, key=lambda point: abs(float(point[0]) - x))
    assert abs(float(nearest[1]) - y) < 6


def test_the_axes_are_labelled():
    texts = {text.text for text in ElementTree.fromstring(CHART.svg()).findall(".//{*}text")}
    assert {"100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "1 s", *SYSTEMS} <= texts


def test_without_a_kernel():
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', CHART._repr_html_())
    assert found is not None
    assert base64.b64decode(found[1]).decode() == CHART.svg()


def test_in_words():
    first, *rest = repr(CHART).splitlines()
    assert "the fastest" in first
    assert [line.rsplit(": ")[-1] for line in rest] == [
        "Pipe-SGD int8 is the fastest",
        "Pipe-SGD is the fastest",
    ]
    assert rest[0].startswith("100 Mbit/s to ")


NAN = float("nan")


def run(*accuracies):
    rows = [
        {"step": step, "rank": rank, "accuracy": accuracy}
        for step, accuracy in enumerate(accuracies)
        for rank in range(2)
    ]
    return SimpleNamespace(metrics=pandas.DataFrame(rows, columns=["step", "rank", "accuracy"]))


ACCURACY = wb.AccuracyChart({"good": run(NAN, 0.5, NAN, 0.975), "bad": run(NAN, NAN)})


def test_it_says_how_runs_ended():
    assert repr(ACCURACY).splitlines()[1:] == ["good: 97.5%", "bad: not measured"]


def test_a_circle_for_each_evaluation():
    picture = ElementTree.fromstring(ACCURACY.svg())
    assert len(list(picture.findall(".//{*}circle"))) == 2
    assert "data:image/svg+xml;base64," in ACCURACY._repr_html_()
