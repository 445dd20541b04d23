"""Notebook 00 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("00-tour", MODEL="mobilenet_v3_small", ENGINES=2, STEPS=16, WITHIN_S=5.0)
    outputs = outputs_of(notebook, tmp_path)
    assert "group_size 3 does not divide" in text_of(outputs["failure"])
    assert "16 steps, none lost" in text_of(outputs["check"])
    (table,) = outputs["phases"]
    assert "samples/s, predicted" in table.data["text/plain"]
    (comparison,) = outputs["compare"]
    assert "ms predicted" in comparison.data["text/plain"]
    (shown,) = [o for o in outputs["ranks"] if "ranks 0, 1: done" in str(o.data)]
    assert "the largest piece" in shown.data["text/html"]
