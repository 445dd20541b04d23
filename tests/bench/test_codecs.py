"""The bench of codecs on a cluster that is not there."""

import pytest

from workbench.bench import codecs
from workbench.bench.harness.match import Seen
from workbench.bench.harness.progress import Part, Progress

NBYTES = 2**16


class FakeCluster:
    """Every all-reduce takes a second, of which coding takes 7 ms on the slower rank."""

    def call(self, task, experiment, *, module, turns, rounds):
        assert 4 * experiment.plan.graph.parameters == NBYTES
        assert {(turn.alone, turn.runs.algorithm, rounds) for turn in turns} == {(True, "ring", 1)}
        phases = {"encode": 0.001, "wait": 0.9, "reduce": 0.002}
        return [
            {turn.name: Seen([1.0], 0.0, phases | {"decode": decode_s}) for turn in turns}
            for decode_s in (0.001, 0.004)
        ]


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
