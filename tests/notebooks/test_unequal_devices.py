"""Notebook 03 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read(
        "03-unequal-devices", SPEEDS=(2, 1), BATCH=24, DIVISOR=10, STEPS=4, ROUNDS=1, WITHIN_S=5.0
    )
    outputs = outputs_of(notebook, tmp_path)
    assert "over the fastest alone 1.50" in text_of(outputs["ideal"])
    (table,) = outputs["result"][-1:]
    assert "filters, by speed" in table.data["text/plain"]
    assert text_of(outputs["exact"]).count("<Verification") == 2
    assert "none lost, and all ranks agree" in text_of(outputs["check"])
