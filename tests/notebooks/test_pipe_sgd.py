"""Notebook 02 runs, and shows what it says."""

import re

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("02-pipe-sgd", STEPS=6, ROUNDS=1, LESSONS=10)
    outputs = outputs_of(notebook, tmp_path)
    assert "5.45 x as fast as PS-Sync" in text_of(outputs["headline"])
    (curve,) = outputs["curve"]
    shown = re.findall(r"^([\d.]+) +([\d.]+) ", curve.data["text/plain"], re.M)
    assert shown[0] == ("0.05", "14.06")
    assert shown[3] == ("0.28", "5.45")
    assert "ranks agree" in text_of(outputs["check"])
    for drawn in ("model", "race", "learn"):
        (chart,) = [o for o in outputs[drawn] if "text/html" in o.get("data", {})]
        assert "data:image/svg+xml;base64," in chart.data["text/html"]
