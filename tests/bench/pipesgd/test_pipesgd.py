"""The benchmark runs, quickly, and gives every figure, on hosts that it makes and removes."""

import json
import os
from xml.etree import ElementTree

import pytest

from tests.hosts.emulated.needs import needs_hosts, traces
from workbench.bench.__main__ import main
from workbench.bench.pipesgd import headline
from workbench.bench.pipesgd.learning import Learnt

FIGURES = {
    "r_measured_1",
    "pipe_vs_dsync_r1",
    "gain_vs_bound_r1",
    "iteration_vs_model_r1",
    "width3_vs_width2",
    "width4_vs_width2",
    *headline.RATIOS,
    *(f"bytes_{codec}_vs_fp32" for codec in headline.CODECS),
    *(f"coding_{codec}_vs_exchange" for codec in headline.CODECS),
    "accuracy_points_digits",
    "time_to_accuracy_digits",
    "lost_without_warmup",
    "lost_with_warmup_alone",
}


@needs_hosts
@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pipesgd", "--quick", "--json", "found.json", "--plot", "found.svg"]) == 0
    assert ElementTree.fromstring((tmp_path / "found.svg").read_text()).findall(".//{*}rect")
    content = json.loads((tmp_path / "found.json").read_text())
    figures = content["figures"]
    assert set(figures) == FIGURES
    # Times are of this machine and moment; bytes are not.
    assert figures["bytes_fp16_vs_fp32"]["median"] == pytest.approx(1 / 2)
    assert figures["bytes_int8_vs_fp32"]["median"] == pytest.approx(1 / 4 + 1 / 1024, rel=1e-3)
    received = {r["system"]: r["MB received, most"] for r in content["rows"] if "coding, s" in r}
    assert received["Pipe-SGD"] == received["D-Sync"] == received["exchange"]
    assert received["PS-Sync"] == pytest.approx(2 * received["D-Sync"], rel=1e-3)
    assert traces(os.getpid()) == []


def test_seconds_to_an_accuracy():
    learnt = Learnt(((1.0, 0.5), (2.0, 0.9), (3.0, 0.8)))
    assert learnt.accuracy == 0.8
    assert [learnt.seconds_to(goal) for goal in (0.4, 0.9, 0.95)] == [1.0, 2.0, float("inf")]
    assert Learnt(()).accuracy == 0.0
