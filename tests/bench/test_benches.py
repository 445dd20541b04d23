"""Benchmarks keep what they have found, whatever ends them; all of them make a page."""

import json

import pytest

from workbench.bench import loading, page
from workbench.bench.__main__ import main
from workbench.bench.benches import BENCHES, Bench
from workbench.bench.page import measure_all
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Figure, Report

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
    unfinished = "It has not ended: this is what was found so far."
    assert [one.notes[1:] for one in kept] == [*[(unfinished,)] * 7, ()]


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    bench(monkeypatch, ends=KeyboardInterrupt(), at=2)
    assert main([PLACE, "--json", str(tmp_path / "found.json")]) == 130
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["figures"]["ratio"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert "Not all was run: 2 of 7 of rounds." in content["notes"]
    assert content["notes"][-1] == "It was interrupted: this is what was found before."
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

        monkeypatch.setattr(page, f"run_{name}", run, raising=False)
        return Bench(f"page:run_{name}", BENCHES[name].what, minutes=1)

    return {name: of(name, took) for name, took in seconds.items()}, clock


def test_all_of_them_write_a_page_with_a_json_beside_it(monkeypatch, tmp_path):
    benches, clock = every(monkeypatch, search=1.0, codecs=RuntimeError("no root"), models=1.0)
    found, interrupted = measure_all(tmp_path, None, quick=True, benches=benches, now=clock)
    assert (list(found.reports), interrupted) == (["search", "models"], False)
    text = (tmp_path / "measured.md").read_text()
    assert text == found.as_markdown()
    assert f"## `search`: {BENCHES['search'].what}\n" in text
    assert "| `ratio` | 4 | 2 .. 6 |\n" in text
    assert "## Not measured\n\n* `codecs`: RuntimeError: no root\n" in text
    assert max(map(len, text.splitlines())) <= 160
    content = json.loads((tmp_path / "measured.json").read_text())
    assert content["benches"]["models"]["figures"]["ratio"]["median"] == 4.0
    assert content["machine"]["cores"] >= 1
    assert content["missing"] == {"codecs": "RuntimeError: no root"}


def test_a_budget_of_all_is_shared(monkeypatch, tmp_path):
    """What the first one does not use, the others have; each has a figure."""
    benches, clock = every(monkeypatch, search=0.5, codecs=10.0, models=100.0)
    found, _ = measure_all(tmp_path, 30.0, quick=False, benches=benches, now=clock)
    rounds = {name: len(report.notes) and report.notes[0] for name, report in found.reports.items()}
    assert rounds == {
        "search": 0,
        "codecs": "Not all was run: 1 of 7 of rounds.",
        "models": "Not all was run: 1 of 7 of rounds.",
    }


def test_an_interrupt_ends_all_and_keeps_the_page(monkeypatch, tmp_path):
    benches, clock = every(monkeypatch, search=1.0, codecs=KeyboardInterrupt(), models=1.0)
    found, interrupted = measure_all(tmp_path, None, quick=False, benches=benches, now=clock)
    assert (list(found.reports), interrupted) == (["search"], True)
    assert "| `ratio` | 4 | 2 .. 6 |" in (tmp_path / "measured.md").read_text()


@pytest.mark.parametrize("options", [["--only", "x"], ["--json", "x"], ["--plot", "x"]])
def test_options_of_one_benchmark_are_not_of_all(options, capsys):
    with pytest.raises(SystemExit):
        main(["all", *options])
    assert f"{options[0]}: of one benchmark, not of all" in capsys.readouterr().err
