"""The benchmark runs, quickly, and gives every figure."""

import json
from xml.etree import ElementTree

import pytest

from workbench.bench import splitbrain
from workbench.bench.__main__ import main
from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.rivals.rivals import ZERO_MISSING
from workbench.bench.rivals.savings import GROUP_SIZES
from workbench.model.tracing.trace import trace

FIGURES = {
    "throughput_vs_ddp",
    "peak_bytes_vs_ddp",
    "speedup_over_one_engine",
    "throughput_vs_one_process",
    "throughput_vs_torch_fsdp2",
    "throughput_vs_torch_ddp_tp",
    "throughput_vs_best_peer",
}


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(splitbrain, "zero_is_installed", lambda: False)
    assert main(["splitbrain", "--quick", "--json", "found.json", "--plot", "found.svg"]) == 0
    picture = ElementTree.fromstring((tmp_path / "found.svg").read_text())
    assert len(picture.findall(".//{*}rect")) == 1 + 2 * (6 + 7)
    content = json.loads((tmp_path / "found.json").read_text())
    assert set(content["figures"]) == FIGURES | {f"parameters_saved_k{k}" for k in GROUP_SIZES}
    assert all(f["min"] <= f["median"] <= f["max"] for f in content["figures"].values())
    # A classifier of two thirds of the weights is cut in four. DDP's own peak holds, by the timing
    # of its threads, one more copy of the gradients or not: the ratio is 0.64 or 0.76.
    assert content["figures"]["peak_bytes_vs_ddp"]["median"] < 0.8
    assert ZERO_MISSING in content["notes"]
    assert content["rows"][0]["system"] == "workbench"
    # All train the same model on the same rows: only dropout's masks are their own.
    losses = {
        row["system"]: row["loss"]
        for row in content["rows"]
        if row.get("system", "one engine") != "one engine"
    }
    assert max(losses.values()) - min(losses.values()) < 0.1, losses


def test_the_small_vgg_is_the_reference_s():
    graph = trace(SmallVGG(), input_shape=INPUT_SHAPE)
    linear = sum(layer.parameters for layer in graph.layers if layer.kind == "linear")
    assert (graph.parameters, linear) == (7_580_746, 5_255_178)
