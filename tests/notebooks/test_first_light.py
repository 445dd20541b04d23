"""Notebook 01 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read(
        "01-first-light",
        MODEL="mobilenet_v3_small",
        ENGINES=2,
        TARGET=0.0,
        STEPS=3,
        ROUNDS=1,
        LAPS=3,
    )
    outputs = outputs_of(notebook, tmp_path)
    assert "group" in text_of(outputs["failure"])
    (dashboard,) = [o for o in outputs["experiment"] if "text/html" in o.get("data", {})]
    assert "finished, 3 of 3 steps" in dashboard.data["text/plain"]
    assert "data:image/svg+xml;base64," in dashboard.data["text/html"]
    assert "times as fast, over 1 rounds" in text_of(outputs["answer"])
