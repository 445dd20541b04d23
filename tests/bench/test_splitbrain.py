"""The benchmark runs, quickly, and gives every figure."""

import json

import pytest

from workbench.bench.__main__ import main

FIGURES = {
    "throughput_vs_ddp",
    "peak_bytes_vs_ddp",
    "speedup_over_one_engine",
    "throughput_vs_one_process",
}


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["splitbrain", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert set(content["figures"]) == FIGURES
    assert all(f["min"] <= f["median"] <= f["max"] for f in content["figures"].values())
    # Memory is exact, unlike time: AlexNet's classifier is cut in four.
    assert content["figures"]["peak_bytes_vs_ddp"]["median"] < 0.5
    assert content["rows"][0]["system"] == "workbench"
