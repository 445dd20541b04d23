"""The bench of codecs on a cluster that is not there."""

import pytest

from workbench.bench import codecs
from workbench.bench.progress import Part, Progress
from workbench.client.calibration.sum_trace import SumTrace
from workbench.plan.experiment.metrics import CollectiveTrace, Phase

NBYTES = 2**16


class FakeCluster:
    """Every all-reduce takes a second, of which coding takes 7 ms on the slower rank."""

    def trace_all_reduce(self, nbytes, *, algorithm, codec, times):
        assert (nbytes, algorithm, times) == (NBYTES, "ring", 1)
        ranks = []
        for rank, decode_s in enumerate((0.001, 0.004)):
            phases = (
                Phase("encode", 0, 0.0, 0.001),
                Phase("wait", 1, 0.001, 0.9),
                Phase("reduce", 1, 0.901, 0.002),
                Phase("decode", 1, 0.903, decode_s),
            )
            ranks.append(CollectiveTrace(rank, "g", "all_reduce", "", 1, 1.0, phases))
        return SumTrace(codec.name, tuple(ranks))


def rounds(count):
    progress = Progress(say=lambda line: None)
    progress.begin(Part("rounds", count, 1.0))
    return progress


def test_figures_are_parts_of_the_uncoded_transfer():
    *_, report = codecs.compare(FakeCluster(), rounds(2), NBYTES)
    wire_s = 2 * 3 / 4 * NBYTES / 125e6
    assert report.figures["int8_coding_traced_vs_transfer"].median == pytest.approx(0.007 / wire_s)
    alone = report.figures["int8_coding_vs_transfer"]
    assert 0 < alone.min <= alone.median <= alone.max
    assert [row["codec"] for row in report.rows] == list(codecs.get_args(codecs.CodecName))
    rows = {row["codec"]: row for row in report.rows}
    assert rows["int8"]["smaller"] == pytest.approx(4 / (1 + 4 / 1024))
    assert "1 Gbit/s" in report.as_text()


def test_a_codec_of_one_s_own_is_measured_beside():
    own = ("tests.own_sums:Half", "tests.own_sums:Sign")
    (report,) = codecs.compare(FakeCluster(), rounds(1), NBYTES, own)
    rows = {row["codec"]: row for row in report.rows}
    assert rows["Half"]["smaller"] == 2
    assert "Sign_coding_traced_vs_transfer" in report.figures
