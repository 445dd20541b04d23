"""The benchmark of loading runs, quickly, and gives every figure."""

import json

import pytest

from workbench.bench.__main__ import main


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["loading", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["figures"].keys() == {"with_workers", "without_workers"}
    assert all(0 < figure["min"] for figure in content["figures"].values())
    assert [row["data"] for row in content["rows"]] == [
        "synthetic data",
        "own data, no workers",
        "own data, a worker for each rank",
    ]
