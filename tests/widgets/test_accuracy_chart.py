"""Runs of one task, side by side; one that diverged has no end."""

from types import SimpleNamespace
from xml.etree import ElementTree

import pandas

import workbench as wb

NAN = float("nan")


def run(*accuracies):
    rows = [
        {"step": step, "rank": rank, "accuracy": accuracy}
        for step, accuracy in enumerate(accuracies)
        for rank in range(2)
    ]
    return SimpleNamespace(metrics=pandas.DataFrame(rows, columns=["step", "rank", "accuracy"]))


CHART = wb.AccuracyChart({"good": run(NAN, 0.5, NAN, 0.975), "bad": run(NAN, NAN)})


def test_it_says_how_runs_ended():
    assert repr(CHART).splitlines()[1:] == ["good: 97.5%", "bad: not measured"]


def test_a_circle_for_each_evaluation():
    picture = ElementTree.fromstring(CHART.svg())
    assert len(list(picture.findall(".//{*}circle"))) == 2
    assert "data:image/svg+xml;base64," in CHART._repr_html_()
