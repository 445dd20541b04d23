"""Notebook 05 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("05-your-own-model", STEPS=4, IMAGES=16)
    outputs = outputs_of(notebook, tmp_path)
    assert "has lost the batch" in text_of(outputs["untraceable"])
    assert "'shard_heads'; did you mean" in text_of(outputs["failure"])
    assert "cannot be read as an image" in text_of(outputs["damaged"])
    assert "by a plain torch module" in text_of(outputs["home"])
