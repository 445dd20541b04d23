"""However a cluster's owner ends: what goes on does, and nothing else stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import leftovers
from workbench.client.cluster import Cluster
from workbench.client.lifecycle import end, sweep
from workbench.client.run.run import Run
from workbench.hosts.processes import until
from workbench.store.errors import ClusterError
from workbench.supervisor import supervisor_of

LONG_S = 60.0
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

    def read_until_busy(self, *, count: bool = True) -> None:
        line = self.process.stdout.readline()
        assert line == "busy\n", line + self.process.stderr.read()
        if count:  # one with a name is not known as its owner's
            for module in ("supervisor", "server"):
                assert len(leftovers.of_kind(self.pid, f"workbench.{module}")) == 1
            assert len(leftovers.of_kind(self.pid, "ipyparallel.controller")) == 1
            assert len(leftovers.of_kind(self.pid, "ipyparallel.engine")) >= 2


def grow(run: Run) -> None:
    """Returns when two more rows have come."""
    for _ in range(2):
        seen = len(run.rows)
        assert until(lambda seen=seen: len(run.rows) > seen, LONG_S, 0.02)


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
    for folder in tmp_path.glob(".cluster-*"):
        end(folder, at_once=True)
    for owner in owners:
        assert leftovers.gone_within(owner.pid, LONG_S)


@pytest.mark.slow
def test_an_exception_leaves_nothing_where_nothing_goes_on(own, tmp_path):
    owner = own("idle")
    owner.read_until_busy()
    _out, error = owner.process.communicate("go\n", timeout=60)
    assert error.rstrip().endswith("ValueError: a notebook's mistake"), error
    assert owner.process.returncode == 1
    assert leftovers.of(owner.pid) == []
    assert list(tmp_path.glob(".cluster-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_run_goes_on_without_its_notebook(own, tmp_path, how):
    owner = own("raise")
    owner.read_until_busy()
    if how == "kill":
        owner.process.kill()
        owner.process.wait()
    else:
        owner.process.communicate("go\n", timeout=60)
    (folder,) = tmp_path.glob(".cluster-*")
    before = [process.pid for process in leftovers.of(owner.pid)]
    cluster = Cluster.attach(folder)
    assert set(cluster.pids) < set(before)
    run = cluster.jobs[1]
    assert len(cluster.jobs) == 1
    grow(run)
    assert run.state == "running"
    run.stop()
    assert run.wait(LONG_S).state == "stopped"
    steps = run.metrics["step"]
    assert steps.tolist() == [step for step in range(len(steps) // 2) for _rank in (0, 1)]
    assert run.notes == []
    assert len(cluster.jobs[run.id].wait(LONG_S).rows) == len(run.rows)
    del cluster, run
    assert leftovers.gone_within(owner.pid, LONG_S)


@pytest.mark.slow
def test_after_its_last_run_nothing_is_left_of_a_cluster_without_owner(own, tmp_path):
    owner = own("idle")
    owner.read_until_busy()
    owner.process.kill()
    owner.process.wait()
    assert leftovers.gone_within(owner.pid, LONG_S)
    sweep(tmp_path)
    assert list(tmp_path.glob(".cluster-*")) == []


@pytest.mark.slow
def test_a_named_cluster_is_found_again_with_its_past(own, tmp_path):
    owner = own("keep")
    owner.read_until_busy(count=False)
    with pytest.raises(
        ClusterError, match=r"there is a cluster 'kept' .* Cluster.attach\('kept'\)"
    ):
        Cluster(2, directory=tmp_path, name="kept")
    owner.process.communicate("go\n", timeout=60)
    with Cluster.attach("kept") as cluster:
        assert cluster.name == "kept"
        run = cluster.jobs[1]
        assert len(cluster) == 2
        supervisor = supervisor_of(cluster.folder)
        os.kill(supervisor.pid, signal.SIGKILL)
        assert until(lambda: not supervisor.is_alive, LONG_S, 0.01)
        again = Cluster.attach("kept")  # starts another supervisor, which goes on with the job
        followed = again.jobs[run.id]
        assert until(lambda: followed.rows and followed.notes, LONG_S, 0.02)
        followed.stop()
        followed.wait(LONG_S)
    with pytest.raises(ClusterError, match="there is no cluster 'kept'"):
        Cluster.attach("kept")


@pytest.mark.slow
def test_a_paused_engine_does_not_outlive_a_killed_supervisor(own, tmp_path):
    owner = own("pause")
    owner.read_until_busy()
    (folder,) = tmp_path.glob(".cluster-*")
    os.kill(supervisor_of(folder).pid, signal.SIGKILL)
    assert leftovers.gone_within(owner.pid, LONG_S)


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
