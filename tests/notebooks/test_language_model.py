"""Notebook 09 runs, and shows what it says."""

import pytest

from tests.notebooks.running import outputs_of, read, text_of


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
def test_runs(tmp_path):
    notebook = read("09-language-model", STEPS=24, BLOCKS=1)
    outputs = outputs_of(notebook, tmp_path)
    assert "scaled_dot_product_attention" in text_of(outputs["ways"])
    assert str(outputs["verify"]).count("fp64: exact") == 3
    assert "fp64: exact" in str(outputs["clipped"])
    assert "must not depend on others" in text_of(outputs["mean"])
    (table,) = outputs["compare"]
    assert "peak MiB, measured" in table.data["text/plain"]
    assert "the same model, up to rounding" in text_of(outputs["check"])
    assert text_of(outputs["home"]).startswith("def ")
