"""A small checkout, its tests, and what they make of faults."""

import json
import shutil
from pathlib import Path

import pytest

from tests.mutants import planting
from tests.mutants.faults import faults
from tests.mutants.suite import Observed, Outcome, attempt, observe, verdict
from tests.mutants.witness import CALLS_IN_VAIN

HERE = Path(__file__).resolve().parent
FILE = "workbench/plan/small.py"
VALUES = "workbench/plan/values.py"
SOURCE = """
from workbench.plan.values import FIRST


def part(a, rank, k):
    total = a[rank % k] + FIRST
    while rank:
        rank -= 1
        total += rank
    return total if total > 0 else 0


def unused(a):
    return a + 1
"""
TESTS = """
from threading import Thread

import pytest

from workbench.plan.small import part


def test_first():
    assert part([5, 6], 0, 2) == 5


@pytest.mark.parametrize("rank", [1, 2])
def test_others(rank):
    found = []
    thread = Thread(target=lambda: found.append(part([5, 6], rank, 2)))
    thread.start()
    thread.join()
    assert found == [[6, 6][rank - 1]]


def test_nothing():
    pass


def test_broken():
    assert part([1, 2], 0, 2) == 2
"""


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "test_*")
    shutil.copytree(HERE, root / "tests" / "mutants", ignore=ignore)
    (root / FILE).parent.mkdir(parents=True)
    shutil.copy(HERE.parents[1] / "workbench" / "__init__.py", root / "workbench")
    (root / FILE).write_text(SOURCE)
    (root / VALUES).write_text("FIRST = 0\n")
    (root / "tests" / "test_small.py").write_text(TESTS)
    return root


@pytest.mark.slow
def test_faults_are_killed_by_the_tests_that_execute_them(root, tmp_path):
    seen = observe(root, tmp_path / "observed", [FILE], ["tests"])
    assert [test.name for test in seen.tests.values()] == [
        "tests/test_small.py::test_first",
        "tests/test_small.py::test_others[1]",
        "tests/test_small.py::test_others[2]",
        "tests/test_small.py::test_nothing",
    ]
    assert seen.failed == ("tests/test_small.py::test_broken",)

    def tried(kind, old):
        fault, *_ = (f for f in faults(SOURCE, FILE) if (f.kind, f.old) == (kind, old))
        near = seen.near(fault, most_s=60.0)
        return attempt(root, tmp_path / f"{fault.start}", fault, near)

    killed = tried("missing sum", "total += rank")
    assert killed.tests == 2
    assert killed.by.startswith("tests/test_small.py::test_others")  # the quicker one
    assert killed.said.startswith("E ")
    missed = tried("missing sum", "a + 1")
    assert not missed.killed
    assert missed.said == "no quick test executes it"
    assert (root / FILE).read_text() == SOURCE


@pytest.mark.slow
def test_runs_of_several_tests_are_one(root, tmp_path):
    (root / "tests" / "test_other.py").write_text(
        "from workbench.plan.small import part, unused\n\n\n"
        "def test_other():\n    assert part([5], 0, 1) == 5\n\n\n"
        "def test_unused():\n    assert unused(1) == 2\n"
    )
    seen = Observed.joined(
        [
            observe(root, tmp_path / name, [FILE, VALUES], [f"tests/test_{name}.py"])
            for name in ("small", "other")
        ]
    )
    assert len(seen.tests) == 6
    assert seen.failed == ("tests/test_small.py::test_broken",)
    assert seen.importers == {FILE: (), VALUES: (FILE,)}

    def near(kind, old):
        fault, *_ = (f for f in faults(SOURCE, FILE) if (f.kind, f.old) == (kind, old))
        return {test.name.rpartition("::")[2] for test in seen.near(fault, most_s=60.0)}

    assert near("missing sum", "a + 1") == {"test_unused"}
    assert near("missing sum", "total += rank") == {"test_others[1]", "test_others[2]"}
    assert near("wrong condition", "total > 0") >= {"test_first", "test_other", "test_others[1]"}


@pytest.mark.slow
def test_what_is_read_at_import_is_tried_with_the_tests_of_those_that_import_it(root, tmp_path):
    seen = observe(root, tmp_path / "observed", [FILE, VALUES], ["tests"])
    assert seen.importers == {FILE: (), VALUES: (FILE,)}
    fault, *_ = faults((root / VALUES).read_text(), VALUES)
    near = seen.near(fault, most_s=60.0)
    assert {test.name.partition("::")[2] for test in near} >= {"test_first", "test_others[1]"}
    assert attempt(root, tmp_path / "first", fault, near).killed


@pytest.mark.slow
def test_what_a_function_gives_at_import_is_tried_with_the_tests_of_its_file(root, tmp_path):
    source = f"{SOURCE}\n\nONE = unused(0)\n"
    (root / FILE).write_text(source)
    (root / "tests" / "plan").mkdir()
    (root / "tests" / "plan" / "test_small.py").write_text(
        "from workbench.plan import small\n\n\ndef test_one():\n    assert small.ONE == 1\n"
    )
    (root / "tests" / "test_small.py").unlink()
    seen = observe(root, tmp_path / "observed", [FILE], ["tests"])
    fault, *_ = (f for f in faults(source, FILE) if f.old == "a + 1")
    for every in (seen, Observed.joined([seen, seen])):
        near = every.near(fault, most_s=60.0)
        assert {test.name for test in near} == {"tests/plan/test_small.py::test_one"}
    assert attempt(root, tmp_path / "first", fault, near).killed


@pytest.mark.slow
def test_what_runs_behind_too_deep_a_recursion_is_seen(root, tmp_path):
    deep = "def test_deep():\n    def deep():\n        deep()\n\n"
    deep += "    with pytest.raises(RecursionError):\n        deep()\n"
    (root / "tests" / "test_small.py").write_text(f"import pytest\n\n\n{deep}\n{TESTS}")
    seen = observe(root, tmp_path / "observed", [FILE], ["tests"])
    fault, *_ = (f for f in faults(SOURCE, FILE) if f.old == "total > 0")
    assert "tests/test_small.py::test_first" in {t.name for t in seen.near(fault, most_s=60.0)}


@pytest.mark.slow
def test_what_is_called_often_is_not_watched_for_ever(root, tmp_path):
    often = "def test_often():\n    for _ in range(2 * %d):\n        part([5, 6], 0, 2)\n"
    often += "    part([5, 6], 1, 2)\n\n\ndef test_after():\n    part([5, 6], 1, 2)\n"
    (root / "tests" / "test_often.py").write_text(
        f"from workbench.plan.small import part\n\n\n{often % CALLS_IN_VAIN}"
    )
    seen = observe(root, tmp_path / "observed", [FILE], ["tests/test_often.py"])

    def near(old):
        fault, *_ = (f for f in faults(SOURCE, FILE) if f.old == old)
        return [test.name.rpartition("::")[2] for test in seen.near(fault, most_s=60.0)]

    assert sorted(near("total > 0")) == ["test_after", "test_often"]
    assert near("total += rank") == ["test_after"]  # which watches anew


@pytest.mark.slow
def test_a_hang_is_a_kill_and_what_nothing_shows_survives(root, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.mutants.suite.BESIDES_S", 1.0)
    seen = observe(root, tmp_path / "observed", [FILE], ["tests"])
    hang, same = (
        next(f for f in faults(SOURCE, FILE) if (f.old, f.new) == change)
        for change in (("rank -= 1", "pass"), ("total > 0", "(total >= 0)"))
    )
    survived = attempt(root, tmp_path / "same", same, seen.near(same, most_s=60.0))
    assert (survived.killed, survived.tests) == (False, 3)
    killed = attempt(root, tmp_path / "hang", hang, seen.near(hang, most_s=60.0))
    assert (killed.tests, killed.said) == (2, "ended with status 1")
    assert killed.by.startswith("tests/test_small.py::test_others")


def test_a_report_names_the_survivors():
    fault, *_ = faults(SOURCE, FILE)
    killed, survivor = Outcome(fault, "a", "b", 3, 1.0), Outcome(fault, "", "", 3, 1.0)
    content = planting.report([killed, killed, killed, survivor], seed=7).as_json()
    assert content["figures"]["mutants_killed_share"]["median"] == 0.75
    assert content["rows"] == [{"fault": fault.kind, "planted": 4, "killed": 3}]
    assert [note for note in content["notes"] if str(fault) in note] == [
        f"survived: {fault} (3 tests)"
    ]
    assert json.dumps(content)


BEGUN = {"test": "a::b", "number": 1, "engines": False}
PASSED = {"test": "a::b", "phase": "call", "outcome": "passed", "seconds": 1.0, "said": ""}
FAILED = {**PASSED, "outcome": "failed", "said": "E  assert 1 == 2"}


@pytest.mark.parametrize(
    ("found", "status", "by", "said"),
    [
        ([BEGUN, PASSED], 0, "", ""),
        ([BEGUN, FAILED], 1, "a::b", "E  assert 1 == 2"),
        ([BEGUN, FAILED], None, "a::b", "E  assert 1 == 2"),
        ([BEGUN], 1, "a::b", "ended with status 1"),
        ([], 2, "collection", "the tests cannot be collected"),
        ([BEGUN, PASSED], 5, "collection", "the tests cannot be collected"),
        ([BEGUN], None, "", "undecided: its tests took longer than they may"),
        ([], None, "", "undecided: its tests took longer than they may"),
    ],
)
def test_what_takes_too_long_in_all_kills_nothing(found, status, by, said):
    assert verdict(found, status) == (by, said)
