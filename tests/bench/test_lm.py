"""The benchmark runs, quickly, gives every figure, and all systems learn the same."""

import json

import pytest

from workbench.bench.__main__ import main
from workbench.bench.lm import QUICK
from workbench.bench.nets import GPT
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan

PEERS = ("torch_tp", "torch_sequence", "ddp", "divided_tokens")
WAYS = ("gathered_scores", "scores_by_rows", "loss_parallel")


@pytest.mark.slow
def test_quick(tmp_path):
    assert main(["lm", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert set(content["figures"]) == {
        *(
            f"{figure}_vs_{peer}"
            for figure in ("throughput", "peak_bytes", "loss_gap")
            for peer in (*PEERS, *WAYS)
        ),
        "speedup_over_one_engine",
        "throughput_vs_one_process",
    }
    for peer in (*PEERS, *WAYS):
        assert content["figures"][f"loss_gap_vs_{peer}"]["max"] < 1e-4


def test_all_of_a_block_is_cut_and_nothing_gathered_inside():
    module = GPT(1, QUICK.width, QUICK.tokens, QUICK.vocabulary)
    graph = trace(module, input_shape=(QUICK.tokens,), vocabulary=QUICK.vocabulary)
    plan = Plan.hybrid(graph, 2)
    schemes = {name.rpartition(".")[2]: one.scheme for name, one in plan.layers.items()}
    assert {schemes[name] for name in ("q", "k", "v", "up", "head")} == {"shard_out"}
    assert {schemes[name] for name in ("o", "down")} == {"shard_in"}
    between = [steps for (name, _), steps in plan.flow.edges.items() if name in plan.flow.ways]
    assert not any(between)
