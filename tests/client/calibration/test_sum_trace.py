"""Where an all-reduce over a cluster's engines spends its time."""

import xml.etree.ElementTree as ET

import pytest

from workbench.client.calibration.sum_trace import SumTrace
from workbench.plan import Codec, ExperimentError
from workbench.plan.experiment.metrics import PHASES, CollectiveTrace, Phase


def test_a_coded_ring_is_shown_phase_by_phase(cluster, tmp_path):
    trace = cluster.trace_all_reduce(2**20, algorithm="ring", codec=Codec(name="int8"), times=3)
    phases, table = trace.phases, trace.table
    assert phases["rank"].unique().tolist() == table["rank"].tolist() == [0, 1]
    assert set(phases["phase"]) == set(PHASES)
    assert phases["round"].max() == 2
    # A half to the other rank, coded, and a half back.
    half = Codec(name="int8").encoded_bytes(2**17)
    assert phases.groupby(["rank", "phase"])["bytes"].sum()[0, "send"] == 2 * half
    assert table[[*PHASES]].sum(axis=1).tolist() == pytest.approx(table["all"].tolist(), rel=0.02)
    assert trace.seconds == table["all"].max()
    trace.save(tmp_path / "trace.svg")
    drawn = ET.parse(tmp_path / "trace.svg").getroot()
    bars = [bar for bar in drawn.iter("{http://www.w3.org/2000/svg}rect") if len(bar)]
    assert len(bars) == len(phases)
    assert "int8" in repr(trace)
    assert "<table" in trace._repr_html_()


def test_what_cannot_be_traced_is_refused(cluster):
    with pytest.raises(ExperimentError, match="algorithm 'backend' cannot take codec 'int8'"):
        cluster.trace_all_reduce(2**10, algorithm="backend", codec="int8")
    with pytest.raises(ValueError, match="no codec 'int3'"):
        cluster.trace_all_reduce(2**10, codec="int3")
    with pytest.raises(ValueError, match="an odd count, got 1024 and 2"):
        cluster.trace_all_reduce(2**10, times=2)


def test_the_slowest_rank_speaks_for_all():
    def rank(number, wait_s):
        phases = (Phase("copy", 0, 0.0, 0.001), Phase("wait", 1, 0.001, wait_s, 8))
        return CollectiveTrace(number, "g", "all_reduce", "", 1, 0.001 + wait_s, phases)

    trace = SumTrace("a sum", (rank(0, 0.001), rank(1, 0.003)))
    assert trace.seconds == pytest.approx(0.004)
    assert repr(trace) == "<SumTrace a sum: 4.00 ms, copy 25%, wait 75%>"
