"""The benchmark of the search runs, quickly, and gives every figure."""

import json

import pytest

from workbench.bench.__main__ import main


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["figures"].keys() == {"search_seconds", "gap", "chosen_vs_best", "kendall_tau"}
    assert content["figures"]["chosen_vs_best"]["min"] >= 1.0
    assert content["figures"]["gap"]["max"] < 0.01
    ran = [row for row in content["rows"] if "measured ms" in row]
    assert [row["plan"] for row in ran][-1] == "searched"
    assert ran[-1]["predicted ms"] <= 1.01 * min(row["predicted ms"] for row in ran)
