"""The benchmark of unequal devices runs, quickly."""

import json

import pytest

from workbench.bench.__main__ import main
from workbench.bench.nets import CifarNet
from workbench.model.tracing.trace import trace


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["hetero", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    figures = content["figures"]
    assert {"gain_vs_ideal_rows_2_1", "gain_vs_fastest_alone_filters_2_1"} <= set(figures)
    assert {"recovered_after_slowdown", "rebalancing_rounds", "imbalance"} <= set(figures)
    assert figures["recut_vs_predicted"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert figures["recut_vs_copy"]["min"] > 0
    assert figures["partition_ms"]["median"] > 0
    assert figures["recovered_after_slowdown"]["median"] > 0


def test_the_network_is_that_of_the_paper():
    """Sec. 1.1: 4.12 M parameters in convolutions, 0.49 M in linear layers; 184.1 M MACs."""
    graph = trace(CifarNet(), input_shape=(3, 32, 32))
    convolutions = [layer for layer in graph.layers if layer.kind == "conv2d"]
    held = sum(layer.parameters for layer in convolutions)
    assert held == pytest.approx(4.12e6, rel=0.01)
    assert graph.parameters - held == pytest.approx(0.49e6, rel=0.02)
    assert sum(layer.flops for layer in convolutions) / 2 == pytest.approx(184.1e6, rel=0.001)
