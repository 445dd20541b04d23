"""Faults are tried one after the other; what was found is kept, however it ends."""

import pytest

from workbench.bench.benches import BENCHES
from workbench.bench.exactness.mutants import planting
from workbench.bench.exactness.mutants.faults import Fault
from workbench.bench.exactness.mutants.suite import Observed, Outcome
from workbench.bench.progress import Progress

FAULTS = [
    Fault("off by one", f"workbench/comm/{name}.py", 1, (1, 1), True, 0, 1, "a", "b")
    for name in "abcdef"
]


@pytest.fixture
def tried(monkeypatch):
    """The faults that were tried; the first survives, the others are killed."""
    found = []

    def attempt(root, folder, fault, tests):
        found.append(fault)
        return Outcome(fault, "" if len(found) == 1 else "a test", "", 3, 1.0)

    monkeypatch.setattr(planting, "WORKERS", 1)
    monkeypatch.setattr(planting, "copied", lambda checkout, root: root)
    monkeypatch.setattr(planting, "candidates", lambda root: FAULTS)
    monkeypatch.setattr(planting, "observe", lambda *_: Observed({}, ("a flaky test",), {}, {}))
    monkeypatch.setattr(planting, "attempt", attempt)
    return found


def test_the_share_is_told_after_each_fault(tried):
    said = []
    reports = list(planting.run(Progress(say=said.append), 3, 0))
    shares = [report.figures["mutants_killed_share"].median for report in reports]
    assert shares == [0.0, 0.5, pytest.approx(2 / 3)]
    assert any("0 tests pass" in line and "a flaky test" in line for line in said)
    assert [line.split()[0] for line in said if "off by one" in line] == ["1/3", "2/3", "3/3"]


def test_an_interrupt_keeps_what_was_found_and_tries_no_more(tried):
    kept = []

    def keep(report):
        kept.append(report)
        if len(kept) == 2:
            raise KeyboardInterrupt

    report, interrupted = BENCHES["exactness"].run(
        Progress(say=lambda line: None), keep=keep, mutants=6, seed=0
    )
    assert interrupted
    assert report.figures["mutants_killed_share"].median == 0.5
    assert any("of 6 of faults" in note for note in report.notes)
