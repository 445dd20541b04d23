"""Notebook 08 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("08-your-own-idea", STEPS=8)
    outputs = outputs_of(notebook, tmp_path)
    kinds = ("algorithm", "codec", "scheme", "strategy", "rule")
    for kind in kinds:
        assert "checks hold" in str(outputs[kind]), kind
        assert "✗" not in str(outputs[kind]), kind
    assert "✗" in str(outputs["failure"])
    codes = {cell.id: cell.source for cell in notebook.cells}
    assert all(len(codes[kind].splitlines()) <= 30 for kind in kinds)
