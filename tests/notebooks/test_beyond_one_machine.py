"""Notebook 07 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("07-beyond-one-machine", MODEL="mobilenet_v3_small", STEPS=12)
    outputs = outputs_of(notebook, tmp_path)
    assert "engine_launcher_class" in text_of(outputs["ground"])
    assert "groups across hosts" in text_of(outputs["race"])
    assert "goes on with ranks on engines" in text_of(outputs["vanish"])
    assert "ipcluster_config.py is not there" in text_of(outputs["failure"])
