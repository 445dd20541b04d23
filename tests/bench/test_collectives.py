"""The benchmark runs, quickly, and gives every figure."""

import json

import pytest

from workbench.bench.__main__ import main
from workbench.bench.collectives import NAMED

SIZES = ("1KB", "4KB", "64KB", "1MB", "4MB", "64MB")


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["collectives", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    named = (f"{name}_over_gloo_vs_gloo" for name in NAMED)
    kinds = ("all_reduce_vs_gloo", "bucket_vs_gloo", "all_reduce_vs_over_gloo", *named)
    assert set(content["figures"]) == {f"{kind}_{size}" for kind in kinds for size in SIZES}
    assert all(0 < f["min"] <= f["median"] <= f["max"] for f in content["figures"].values())
    assert any("through shared memory" in note for note in content["notes"])
