"""What the author of a file can do: nothing but give an error, or a value that is safe to show.

`python -m tests.plan.test_hostile 10000 [SEED]` tries that many files.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit

from tests.plan.graphs import transformer, vgg
from workbench.plan import Experiment, Machine, Plan
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError

ROOT = Path(__file__).parents[2]
TEXTS = [Plan.hybrid(vgg(), 4, 2).to_toml(), Plan.hybrid(transformer(), 2).to_toml()]


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts whose author knows how a model's description is signed off, and does so."""
    monkeypatch.setattr(Graph, "fingerprint", property(lambda self: "0" * 12))
    contents = [tomllib.loads(text) for text in TEXTS]
    for content in contents:
        content["graph"]["fingerprint"] = "0" * 12
    return list(map(tomlkit.dumps, contents))


@pytest.mark.parametrize(
    ("was", "now"), [("output_shape = [64]", "output_shape = [0]"), ("heads = 3", "heads = 0")]
)
def test_a_model_that_cannot_be_is_refused(signed, was, now):
    told = [text.replace(was, now) for text in signed if was in text]
    assert told
    for text in told:
        with pytest.raises(PlanError, match=r"\[graph\]: the layers cannot have these schemes"):
            Plan.from_toml(text)


@pytest.mark.slow
def test_every_file_is_refused_or_safe():
    """On every reader; in a process of its own, whose audit hook ends with it."""
    command = [sys.executable, "-m", "tests.plan.test_hostile", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 files: 0 executed, 0 live objects changed" in done.stdout


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * 5000,
        b"a = " + b"1" * 5000,
        b"\xff\xfe\x00",
        b"",
        b"plan = 1",
        b"[plan]\nworld_size = 10_000_000_000\n[graph]",
    ],
)
@pytest.mark.parametrize("kind", [Plan, Experiment, Machine])
def test_what_is_no_such_text_is_told_with_its_file(tmp_path, kind, content):
    (tmp_path / "given.toml").write_bytes(content)
    with pytest.raises((PlanError, ExperimentError, MachineError), match=r"given\.toml: "):
        kind.load(tmp_path / "given.toml")


@pytest.mark.parametrize("kind", [Plan, Experiment, Machine])
def test_a_pipe_is_not_waited_for(tmp_path, kind):
    os.mkfifo(tmp_path / "given.toml")
    with pytest.raises((PlanError, ExperimentError, MachineError), match="no file of at most"):
        kind.load(tmp_path / "given.toml")


if __name__ == "__main__":
    from tests.hostile.fuzz import main

    raise SystemExit(main(*map(int, sys.argv[1:])))
