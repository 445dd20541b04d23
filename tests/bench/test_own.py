"""Algorithms and codecs of one's own take their turns."""

import pytest

from workbench.bench import codecs, collectives
from workbench.bench.__main__ import main
from workbench.bench.collectives import NAMED
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Report

REPORT = Report("nothing", (), {})


def measured(config, fields):
    return collectives.measure(config, None, weights=None, **fields)


def test_an_algorithm_of_one_s_own_takes_its_turn(on_ranks):
    class Seated:
        def call(self, task, experiment, **fields):
            assert task == f"{collectives.__name__}:measure"
            return on_ranks.seated(2, measured, fields)

    progress = Progress(say=lambda line: None)
    progress.begin(Part("sizes", 1, 1.0))
    (report,) = collectives.compare(Seated(), progress, {2**10: 1}, 1, ("tests.own_sums:Tree",))
    assert [row["system"] for row in report.rows] == [*collectives.OURS, *NAMED, "Tree"]
    assert report.figures["Tree_over_gloo_vs_gloo_1KB"].min > 0


def test_options_are_for_their_benches(capsys, monkeypatch):
    given = []
    for module in (collectives, codecs):
        monkeypatch.setattr(module, "run", lambda _, **options: given.append(options) or [REPORT])
    assert main(["collectives", "--algorithm", "mine:Tree", "--quick"]) == 0
    assert main(["codecs", "--codec", "sign"]) == 0
    assert given == [dict(quick=True, algorithm="mine:Tree"), dict(quick=False, codec="sign")]
    with pytest.raises(SystemExit):
        main(["codecs", "--algorithm", "mine:Tree"])
    assert "--algorithm: of collectives only, not of codecs" in capsys.readouterr().err
