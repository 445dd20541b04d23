"""What is left of a dashboard where no kernel runs."""

import re
from threading import RLock
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.widgets.dashboard.fake import MIB, FakeRun, traced
from workbench.widgets.dashboard import still
from workbench.widgets.dashboard.runs import WatchedRun
from workbench.widgets.dashboard.timeline import RunForecast, timeline_of


def seen(run):
    watched = WatchedRun(run, RLock())
    watched.read()
    return watched


def fed(num_steps, **fields):
    run = FakeRun(world_size=2, **fields)
    if num_steps:
        run.feed(0, num_steps - 1)
    return run


FORECAST = RunForecast(None, np.array([[8, 4, 4, 2, 1, 9]] * 2) * float(MIB), 600.0, 0.2)


@pytest.mark.parametrize("num_steps", [0, 1, 50])
@pytest.mark.parametrize("forecast", [RunForecast.none(), FORECAST], ids=["alone", "predicted"])
def test_every_picture_is_well_formed(num_steps, forecast):
    lanes = (timeline_of(traced(2)), timeline_of(traced(2), step=9))
    made = still.picture({"a": seen(fed(num_steps))}, "a", forecast, lanes)
    assert ElementTree.fromstring(made).tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in made.lower()
    assert "Step as measured, step 9" in made


def test_several_runs_are_overlaid_and_named():
    runs = {"first <b>": seen(fed(50)), "second": seen(fed(30))}
    made = still.html(runs, "first <b>", RunForecast.none())
    assert "second: running, 30 of 80 steps" in made
    assert "<b>Run first &lt;b&gt;</b>" in made


def test_text_cannot_break_out():
    run = fed(3)
    run.notes.append("<script>")
    run.end("failed", error=RuntimeError("<script>alert(1)</script>"))
    assert "<script>" not in still.html({"a": seen(run)}, "a", RunForecast.none())


def test_the_html_needs_nothing_from_elsewhere():
    html = still.html({"a": seen(fed(50))}, "a", FORECAST)
    assert 'src="data:image/svg+xml;base64,' in html
    assert "http" not in re.sub(r"base64,[^\"]*", "", html)
    assert html.count("<tr>") == 3
