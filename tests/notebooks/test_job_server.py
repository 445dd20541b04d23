"""Notebook 04 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read(
        "04-job-server",
        MODEL="squeezenet1_1",
        LARGER="squeezenet1_0",
        ENGINES=2,
        STEPS=12,
        ROUNDS=1,
        SIZES=(4096,),
    )
    outputs = outputs_of(notebook, tmp_path)
    assert "died: its process was ended by SIGKILL" in text_of(outputs["kill"])
    assert "All 12 losses are equal, bit for bit" in text_of(outputs["check"])
    (ledger,) = outputs["bytes"]
    assert "through the server" in ledger.data["text/plain"]
    assert "the run has nothing to tell" in text_of(outputs["orphaned"])
    assert "the plan is for 4 ranks" in text_of(outputs["failure"])
