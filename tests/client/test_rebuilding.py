"""A cluster whose store is gone, or that was moved, is what the folders of its runs say."""

import json
import os
import signal
import sqlite3
import stat
import sys
from contextlib import closing

import pytest

import workbench as wb
from tests.scheduler.values import request
from tests.supervisor import supervising
from workbench.plan.extension.user_object import OwnObjectError, opened
from workbench.store import messages, registry
from workbench.store.cluster_spec import key_of
from workbench.store.cluster_store import STORE, rebuild
from workbench.store.errors import StoreError
from workbench.store.store import Store
from workbench.supervisor import supervisor_of

LONG_S = 120.0
STEPS = 60


def experiment(**fields):
    graph = wb.trace("squeezenet1_1", input_shape=(3, 32, 32), num_classes=10)
    return wb.Experiment(
        plan=wb.Plan.data_parallel(graph, 1),
        data=wb.Synthetic(),
        batch_size=2,
        optimizer=wb.SGD(lr=0.001),
        checkpoint_every=4,
        **fields,
    )


def losses(run):
    return run.metrics["loss"].tolist()


def killed(cluster):
    """Its supervisor, and all that this owns."""
    supervisor = supervisor_of(cluster.folder)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervising.until(lambda: supervisor_of(cluster.folder) is None, cluster.folder)


@pytest.mark.slow
def test_jobs_are_there_again_and_go_on(tmp_path):
    """One has ended, one was under way, and one is another cluster's, in the same folder."""
    cluster = wb.Cluster(1, directory=tmp_path / "runs", name="lost")
    ended = cluster.train(experiment(steps=4)).wait(LONG_S)
    straight = losses(cluster.train(experiment(steps=STEPS)).wait(LONG_S))
    gone = cluster.train(experiment(steps=STEPS))
    supervising.until(lambda: list(gone.directory.glob("step-*4")), cluster.folder)
    killed(cluster)
    for path in cluster.folder.glob(f"{STORE}*"):
        path.unlink()
    stranger = tmp_path / "runs" / "of-another"
    stranger.mkdir()
    for name in ("experiment.toml", "environment.json", "outcome.json"):
        text = (ended.directory / name).read_text()
        (stranger / name).write_text(text.replace('"cluster": "lost"', '"cluster": "other"'))
    again = wb.Cluster.attach("lost")
    try:
        records = {record.id: record for record in again.jobs.records}
        assert [records[n].state for n in sorted(records)] == ["finished", "finished", "parked"]
        assert losses(again.jobs[ended.id].wait(LONG_S)) == losses(ended)
        assert any("from the folders of 3 runs" in each.text for each in again.link.store.events())
        (parked,) = (n for n, record in records.items() if record.state == "parked")
        assert records[parked].directory == str(gone.directory)
        again.jobs.resume(parked)
        assert losses(again.jobs[parked].wait(LONG_S)) == straight
    finally:
        again.stop()


@pytest.mark.slow
def test_a_cluster_that_was_moved_has_its_runs_where_they_are_now(tmp_path):
    cluster = wb.Cluster(1, directory=tmp_path / "here", name="moved")
    run = cluster.train(experiment(steps=4)).wait(LONG_S)
    before = losses(run)
    killed(cluster)
    (tmp_path / "here").rename(tmp_path / "there")
    folder = registry.folder_for(tmp_path / "there", "moved")
    again = wb.Cluster.attach(folder, trust=True)
    try:
        (found,) = again.jobs
        assert found.directory == tmp_path / "there" / run.directory.name
        assert losses(found.wait(LONG_S)) == before
        assert list(folder.glob(f"{STORE}.aside-1"))
    finally:
        again.stop()


def test_what_a_run_s_folder_names_is_not_imported(tmp_path):
    """Whoever may write beside the cluster's folder can put one there."""
    folder, planted = registry.folder_for(tmp_path, "lost"), tmp_path / "planted"
    folder.mkdir(mode=0o700)
    planted.mkdir()
    experiment(steps=4, loss="antigravity:loss").save(planted / "experiment.toml")
    times = {"submitted": 0.0, "started": None, "ended": None}
    told = {"cluster": registry.name_of(folder), "times": times}
    (planted / "environment.json").write_text(json.dumps(told))
    rebuild(folder)
    with closing(Store(folder / STORE)) as store:
        arrived = messages.unpack(store.job(1).packed, key_of(folder))
    with pytest.raises(OwnObjectError, match=r"loss\.function, and was not imported"):
        opened(arrived)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("begins", [0, 4096])
def test_a_damaged_store_is_made_again_and_kept(tmp_path, begins):
    """Where nothing of it is a database, or all but its first page, which has the version."""
    folder = registry.folder_for(tmp_path, "kept")
    folder.mkdir(mode=0o700)
    path = folder / STORE
    with closing(Store(path, create=True)) as store:
        store.submit(request(name="of before"))
    size = path.stat().st_size
    for number in (1, 2):
        with path.open("r+b") as file:
            file.seek(begins)
            file.write(b"\xff" * (size - begins))
        damaged = path.read_bytes()
        rebuild(folder)
        assert path.with_name(f"{STORE}.aside-{number}").read_bytes() == damaged
        with closing(Store(path)) as store:
            assert store.jobs() == ()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_of_another_version_stays_where_it_is(tmp_path):
    folder = registry.folder_for(tmp_path, "kept")
    folder.mkdir(mode=0o700)
    Store(folder / STORE, create=True).close()
    with closing(sqlite3.connect(folder / STORE)) as connection:
        connection.execute("PRAGMA user_version = 7")
    before = (folder / STORE).read_bytes()
    with pytest.raises(StoreError, match="has version 7"):
        rebuild(folder)
    assert (folder / STORE).read_bytes() == before
    assert not list(folder.glob("*.aside-*"))


def test_a_whole_store_is_not_made_again(tmp_path):
    folder = registry.folder_for(tmp_path, "kept")
    folder.mkdir(mode=0o700)
    with closing(Store(folder / STORE, create=True)) as store:
        store.set_meta("a note", "of before")
    rebuild(folder)
    with closing(Store(folder / STORE)) as store:
        assert store.meta("a note") == "of before"
