"""env/gpu, with parts that are quick; what it really runs, it runs by itself."""

import json
import sys

import pytest

from env.gpu import Part, main

FIGURES = {"figures": {"ratio": {"median": 2.0, "min": 1.0, "max": 3.0}}}
BENCH = f"import pathlib, sys; pathlib.Path(sys.argv[2]).write_text({json.dumps(FIGURES)!r})"
HANGS = f"{BENCH}; import time; time.sleep(600)"


def part(name, code, limit_s=60.0, **fields):
    return Part(name, (sys.executable, "-c", code), limit_s, **fields)


def table_of(tmp_path, *parts, options=(), status=0):
    assert main(["--into", str(tmp_path), *options], parts) == status
    return (tmp_path / "gpu.md").read_text()


def test_each_part_has_a_line_of_the_table(tmp_path):
    table = table_of(tmp_path, part("device", "print('one|two')"), part("bench", BENCH, bench=True))
    assert "| ok | one/two |\n" in table
    assert "| ok | `ratio` 2 (1 .. 3) |\n" in table
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert f"torch {content['versions']['torch']}" in table.splitlines()[0]
    assert content["parts"]["bench"]["figures"] == FIGURES["figures"]


def test_a_part_that_fails_leaves_the_others_alone(tmp_path):
    fails = part("it fails", "print('why'); raise SystemExit(3)")
    table = table_of(tmp_path, fails, part("other", "print('here')"), status=1)
    assert "| failed, with status 3: it-fails.log | why |\n" in table
    assert "| ok | here |\n" in table
    assert (tmp_path / "it-fails.log").read_text() == "why\n"


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_interrupted_and_keeps_its_figures(tmp_path):
    table = table_of(tmp_path, part("slow", HANGS, limit_s=3.0, bench=True), status=1)
    assert "| took more than 3 s | `ratio` 2 (1 .. 3) |\n" in table


def test_a_dry_run_has_no_gpu_and_names_what_needs_one(tmp_path):
    tells = "import os; print('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    parts = part("tests", "print('ran')", needs_gpu=True), part("bench", tells)
    table = table_of(tmp_path, *parts, options=["--dry"])
    assert "| sees '' |\n" in table
    assert "ran" not in table
    assert table.endswith("Not run, since they need a GPU: tests.\n")
    assert "Not run" not in table_of(tmp_path, *parts)


def test_only_the_named_parts_run(tmp_path):
    parts = [part(name, f"print('{name} ran')", needs_gpu=name == "b") for name in "abc"]
    table = table_of(tmp_path, *parts, options=["--only", "a", "--only", "b"])
    assert "a ran" in table
    assert "b ran" in table
    assert "c ran" not in table
    dry = table_of(tmp_path, *parts, options=["--only", "b", "--dry"])
    assert "ran" not in dry.replace("Not run", "")
    assert dry.endswith("Not run, since they need a GPU: b.\n")


def test_a_part_may_be_shorter_in_a_dry_run(tmp_path):
    one = part("bench", "print('long')", dry=(sys.executable, "-c", "print('short')"))
    assert "| ok | short |\n" in table_of(tmp_path, one, options=["--dry"])
    assert "| ok | long |\n" in table_of(tmp_path, one)


def test_what_has_no_time_left_is_not_begun(tmp_path):
    table = table_of(tmp_path, part("late", "print('ran')"), options=["--within", "30"], status=1)
    assert "| late | 0 | no time was left |  |\n" in table
