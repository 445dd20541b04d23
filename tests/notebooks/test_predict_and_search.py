"""Notebook 06 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("06-predict-and-search", ENGINES=2, BATCH=16, STEPS=6, WITHIN_S=5.0)
    outputs = outputs_of(notebook, tmp_path)
    assert "does not divide world_size 3" in text_of(outputs["failure"])
    assert "Memory is as predicted" in text_of(outputs["check"])
    (matrix,) = [o for o in outputs["recorded"] if "text/html" in o.get("data", {})]
    assert "recorded exactly that, pair by pair" in matrix.data["text/html"]
    for drawn in ("memory", "traffic", "what-if", "timing", "stale", "jobs", "engines"):
        (shown,) = [o for o in outputs[drawn] if "text/html" in o.get("data", {})]
        assert "application/vnd.jupyter.widget-view+json" in shown.data
