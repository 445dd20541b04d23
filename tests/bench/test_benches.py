"""Benchmarks keep what they have measured, whatever ends them; all of them are one file."""

import json

import pytest

from workbench.bench import loading
from workbench.bench.__main__ import main
from workbench.bench.benches import BENCHES, INTERRUPTED, UNFINISHED, Bench, measure_all
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Figure, Report

PLACE = "loading"  # whose function the tests replace


def bench(monkeypatch, seconds=1.0, clock=None, ends=None, at=None):
    """Seven rounds, one of which may end otherwise."""

    def run(progress, *, quick):
        progress.begin(Part("rounds", 7, 1.0))
        found = []
        for index in progress.each("rounds"):
            if index == at:
                raise ends
            if clock is not None:
                clock.s += seconds
            found.append(float(index + 1))
            yield Report("loading", ({"round": index},), {"ratio": Figure.of(found)}, ("a note",))

    monkeypatch.setattr(loading, "run", run)


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def test_results_are_written_as_they_come(monkeypatch, tmp_path):
    bench(monkeypatch)
    kept = []
    report, interrupted = BENCHES[PLACE].run(Progress(say=lambda line: None), keep=kept.append)
    assert (report.figures["ratio"].median, interrupted) == (4.0, False)
    assert [one.figures["ratio"].max for one in kept] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0]
    assert [one.notes[1:] for one in kept] == [*[(UNFINISHED,)] * 7, ()]


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    bench(monkeypatch, ends=KeyboardInterrupt(), at=2)
    assert main([PLACE, "--json", str(tmp_path / "found.json")]) == 130
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["figures"]["ratio"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert "Not all was run: 2 of 7 of rounds." in content["notes"]
    assert content["notes"][-1] == INTERRUPTED
    assert "ratio  1.5 (1 .. 2)" in capsys.readouterr().out


def test_a_run_that_finds_nothing_prints_nothing(monkeypatch, tmp_path, capsys):
    bench(monkeypatch, ends=KeyboardInterrupt(), at=0)
    assert main([PLACE]) == 130
    assert capsys.readouterr().out == ""


def test_the_budget_of_the_command_line_is_in_minutes(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr("workbench.bench.__main__.Progress", lambda **of: Progress(now=clock, **of))
    bench(monkeypatch, 20.0, clock)
    assert main([PLACE, "--budget", "1", "--json", str(tmp_path / "found.json")]) == 0
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 1
    assert clock.s == 60.0


@pytest.mark.parametrize("minutes", ["0", "-3", "inf", "long"])
def test_a_budget_that_is_none(minutes, capsys):
    with pytest.raises(SystemExit):
        main([PLACE, f"--budget={minutes}"])
    assert "--budget" in capsys.readouterr().err


def every(monkeypatch, **seconds):
    """Benchmarks by name that take so long, if they are not ended."""
    clock = Clock()

    def of(name, took):
        def run(progress, *, quick):
            progress.begin(Part("rounds", 7, 1.0))
            for index in progress.each("rounds"):
                if isinstance(took, BaseException):
                    raise took
                clock.s += took
                yield Report(name, ({"round": index},), {"ratio": Figure.of([2.0, index])})

        monkeypatch.setattr(loading, f"run_{name}", run, raising=False)
        return Bench(f"loading:run_{name}", BENCHES[name].what, minutes=1)

    return {name: of(name, took) for name, took in seconds.items()}, clock


def test_all_of_them_print_their_tables_and_are_one_file(monkeypatch, tmp_path, capsys):
    benches, clock = every(monkeypatch, search=1.0, codecs=RuntimeError("no root"), lm=1.0)
    path = tmp_path / "build" / "measured.json"
    content, interrupted = measure_all(path, None, quick=True, benches=benches, now=clock)
    assert (list(content["benches"]), interrupted) == (["search", "lm"], False)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content))
    assert content["benches"]["lm"]["figures"]["ratio"]["median"] == 4.0
    assert content["machine"]["cores"] >= 1
    assert content["missing"] == {"codecs": "RuntimeError: no root"}
    assert capsys.readouterr().out.count("ratio  4 (2 .. 6)") == 2


def test_a_budget_of_all_is_shared(monkeypatch, tmp_path):
    """What the first one does not use, the others have; each has a figure."""
    benches, clock = every(monkeypatch, search=0.5, codecs=10.0, lm=100.0)
    path = tmp_path / "all.json"
    content, _ = measure_all(path, 30.0, quick=False, benches=benches, now=clock)
    short = ["Not all was run: 1 of 7 of rounds."]
    assert {name: report["notes"] for name, report in content["benches"].items()} == {
        "search": [],
        "codecs": short,
        "lm": short,
    }


def test_an_interrupt_ends_all_and_keeps_the_file(monkeypatch, tmp_path):
    benches, clock = every(monkeypatch, search=1.0, codecs=KeyboardInterrupt(), lm=1.0)
    path = tmp_path / "all.json"
    content, interrupted = measure_all(path, None, quick=False, benches=benches, now=clock)
    assert (list(content["benches"]), interrupted) == (["search"], True)
    assert "search" in json.loads(path.read_text())["benches"]


def test_a_part_is_of_one_benchmark(capsys):
    with pytest.raises(SystemExit):
        main(["all", "--only", "x"])
    assert "--only: of one benchmark, not of all" in capsys.readouterr().err
