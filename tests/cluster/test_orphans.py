"""However a cluster's owner ends, no process stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import leftovers

ROOT = Path(__file__).resolve().parents[2]


class Owner:
    """A process that runs `owner.py`."""

    def __init__(self, directory: Path, how: str) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("owner.py")), str(directory), how],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def read_until_busy(self) -> None:
        line = self.process.stdout.readline()
        assert line == "busy\n", line + self.process.stderr.read()
        kinds = [process.cmdline() for process in leftovers.of(self.pid)]
        assert sum("ipyparallel.engine" in kind for kind in kinds) == 2
        assert sum("ipyparallel.controller" in kind for kind in kinds) == 2  # and its heart monitor


@pytest.fixture
def own(tmp_path: Path) -> Iterator:
    owners = []

    def own(how: str) -> Owner:
        owners.append(Owner(tmp_path, how))
        return owners[-1]

    yield own
    for owner in owners:
        owner.process.kill()
        owner.process.communicate()
        assert leftovers.gone_within(owner.pid, 20.0)


@pytest.mark.slow
def test_an_exception_leaves_nothing(own, tmp_path):
    owner = own("raise")
    owner.read_until_busy()
    _out, error = owner.process.communicate("go\n", timeout=60)
    assert error.rstrip().endswith("ValueError: a notebook's mistake"), error
    assert owner.process.returncode == 1
    assert leftovers.of(owner.pid) == []
    assert list(tmp_path.glob(".cluster-*")) == []


@pytest.mark.slow
def test_a_paused_engine_does_not_outlive_a_killed_owner(own):
    owner = own("pause")
    owner.read_until_busy()
    owner.process.kill()
    owner.process.wait()
    assert leftovers.gone_within(owner.pid, 20.0)


@pytest.mark.slow
def test_a_cluster_that_nobody_refers_to_ends_after_its_run(own, tmp_path):
    owner = own("drop")
    owner.read_until_busy()
    out, error = owner.process.communicate("go\n", timeout=60)
    assert (out, error) == ("gone\n", "")
    assert list(tmp_path.glob(".cluster-*")) == []


@pytest.mark.slow
def test_an_interrupt_while_engines_start_leaves_nothing(own, tmp_path):
    owner = own("start")
    deadline = time.monotonic() + 60
    while len(leftovers.of(owner.pid)) < 3:
        assert time.monotonic() < deadline
        assert owner.process.poll() is None
        time.sleep(0.01)
    owner.process.send_signal(signal.SIGINT)
    _out, error = owner.process.communicate(timeout=60)
    assert error.rstrip().endswith("KeyboardInterrupt"), error
    assert leftovers.of(owner.pid) == []
    assert list(tmp_path.glob(".cluster-*")) == []
