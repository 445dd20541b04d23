"""The benchmark of the job server: quickly, and with every figure."""

import json

import pytest

from workbench.bench.__main__ import main


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["jobserver", "--quick", "--json", "found.json"]) == 0
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figures.keys() == {
        "schedule_efficiency",
        "schedule_seconds",
        "store_growth",
        "memory_growth",
        "server_core_share",
        "server_memory_growth",
        "notebook_memory_growth",
        "control_bytes_per_step",
        "tensor_bytes_through_controller",
        "submit_to_first_step",
    }
    assert figures["schedule_efficiency"]["min"] >= 0.95
    assert figures["schedule_seconds"]["max"] < 1.0
    assert figures["store_growth"]["max"] < 1.2
    assert figures["memory_growth"]["max"] < 1.2
    assert figures["server_memory_growth"]["max"] < 1.2
    assert figures["tensor_bytes_through_controller"]["max"] == 0.0
    assert figures["control_bytes_per_step"]["max"] < 10.0
