"""A server that is killed, wherever it stands: no job is lost, none runs twice, all end well."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.server.fake_cluster import FakeCluster, run
from tests.server.fake_tasks import value_after
from tests.server.test_recovery import value
from workbench.store.errors import ClusterError
from workbench.store.process import SERVER, FolderLock


def was_run_once(directory: str) -> bool:
    """Whether no two worlds worked on a job at once, and no rank began twice in one."""
    folder = Path(directory)
    begun = Counter((folder / "begun").read_text().splitlines())
    return not (folder / "twice").exists() and set(begun.values()) == {1}


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))]
)
def test_killed_at_anything_that_it_does(tmp_path, seed):
    cluster = FakeCluster(tmp_path / "cluster", seed=seed)
    try:
        chance = random.Random(seed)
        how = {"keywords": {"steps": 20, "every": 4}, "max_attempts": 20}
        jobs = [cluster.submit(**how) for _ in range(5)]
        jobs += [cluster.submit(engines=1, **how)]
        call = cluster.submit("answer", kind="call", engines=1, places=(2,))
        paused = jobs[chance.randrange(3)]
        cluster.store.command("pause", paused)
        for _ in range(2):
            time.sleep(chance.random())
            os.kill(cluster.store.engines()[chance.randrange(2)].pid, signal.SIGKILL)
        cluster.store.command("resume", paused)
        records = [cluster.ended(job, within_s=60.0) for job in jobs]
        assert [record.state for record in records] == ["finished"] * len(jobs)
        assert all(value(record) == value_after(20) for record in records)
        assert all(was_run_once(record.directory) for record in records)
        assert cluster.ended(call).state == "finished"
        assert cluster.store.commands() == ()
    finally:
        cluster.close()


@pytest.mark.slow
def test_the_server_loads_no_torch():
    code = "import sys, workbench.server.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "pandas", "scipy"}.isdisjoint(done.stdout.split())


@pytest.mark.slow
def test_a_new_server_takes_over(fake):
    """What runs is not disturbed; what ended meanwhile, or died, is seen."""
    job = fake.submit(keywords={"steps": 150})
    waiting = fake.submit(keywords={"steps": 10})
    fake.at_step(job, 20)
    fake.kill_server()
    fake.at_step(job, 60)
    fake.start_server()
    assert fake.ended(job).attempt == 1
    fake.at_step(waiting, 0)
    fake.kill_server()
    time.sleep(1.5)  # it ends while nobody looks
    fake.start_server()
    record = fake.ended(waiting)
    assert (record.state, record.attempt, value(record)) == ("finished", 1, value_after(10))


@pytest.mark.slow
def test_an_engine_that_died_while_nobody_looked(fake):
    job = fake.submit(keywords={"steps": 80})
    record = fake.at_step(job, 20)
    fake.kill_server()
    os.kill(record.pids[0], signal.SIGKILL)
    time.sleep(0.5)
    fake.start_server()
    record = fake.ended(job)
    assert (record.state, record.attempt, value(record)) == ("finished", 2, value_after(80))
    assert "was ended by SIGKILL" in record.attempts[0].reason


@pytest.mark.slow
def test_one_server_for_one_folder(fake, tmp_path):
    fake.ended(fake.submit(keywords={"steps": 2}))
    with pytest.raises(ClusterError, match=r"has a job server already, process \d+"):
        FolderLock(fake.folder / SERVER, "job server")
    second = run("fake_server", fake.folder)
    second.wait()
    assert fake.ended(fake.submit(keywords={"steps": 2})).state == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_bad_database_is_told_and_left_as_it_is(fake, tmp_path, content):
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "cluster.json").write_text((fake.folder / "cluster.json").read_text())
    (folder / "server.sqlite").write_bytes(content)
    if not content:
        with closing(sqlite3.connect(folder / "server.sqlite")) as connection:
            connection.execute("CREATE TABLE jobs (id)")
        content = (folder / "server.sqlite").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "workbench.server", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no job server:" in done.stderr
    assert str(folder / "server.sqlite") in done.stderr
    assert (folder / "server.sqlite").read_bytes() == content
