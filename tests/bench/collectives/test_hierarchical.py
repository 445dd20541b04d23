"""The benchmark runs, quickly, on hosts that it makes and removes."""

import json
import os

import pytest

from tests.hosts.emulated.needs import needs_hosts, traces
from workbench.bench.__main__ import main


@needs_hosts
@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["hierarchical", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["bench"] == "hierarchical"
    assert {"bucket_vs_gloo_1KB", "all_reduce_vs_gloo_1MB"} <= set(content["figures"])
    assert any("shared memory within hosts, gloo across" in note for note in content["notes"])
    assert traces(os.getpid()) == []
