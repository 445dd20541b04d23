"""Faults are tried one after the other; what was found is kept, however it ends."""

import pytest

from tests.mutants import planting
from tests.mutants.faults import Fault
from tests.mutants.suite import Observed, Outcome
from workbench.bench.harness.progress import Progress

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
