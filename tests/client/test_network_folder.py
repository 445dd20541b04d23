"""Runs in a folder that comes over a network: their store is on this host, and nothing is lost."""

import platform
import shutil
from contextlib import closing
from types import SimpleNamespace

import platformdirs
import psutil
import pytest

import workbench as wb
from tests.faults.places import network_disk
from tests.scheduler.values import request
from tests.train.small import net
from workbench.client.cluster import Cluster
from workbench.client.lifecycle import make, sweep
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan
from workbench.store import registry
from workbench.store.cluster_store import (
    STORE,
    is_here,
    open_store,
    rebuild,
    remove,
    sign,
    store_of,
)
from workbench.store.errors import StoreError

ENDED = 2**22 + 1  # no process has such an id


def mounts(monkeypatch, *found):
    mounted = [
        SimpleNamespace(device=device, mountpoint=str(point), fstype=kind)
        for device, point, kind in found
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounted)


def losses(run):
    return sorted((row["step"], row["rank"], row["loss"]) for row in run.wait(60).rows)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """This host's folder for state."""
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("device", "kind", "is_here"),
    [
        ("/dev/sda1", "ext4", True),
        ("overlay", "overlay", True),
        ("tank/home", "zfs", True),
        ("server:/export", "nfs4", False),
        ("//server/share", "cifs", False),
        ("10.0.0.1@tcp:/fs", "lustre", False),
        ("user@host:", "fuse.sshfs", False),
        ("beegfs_nodev", "beegfs", False),
    ],
)
def test_the_store_lies_in_its_clusters_folder_if_that_is_of_this_host(
    tmp_path, monkeypatch, state, device, kind, is_here
):
    runs = tmp_path / "runs"
    mounts(monkeypatch, ("/dev/root", "/", "ext4"), (device, runs, kind))
    folder = registry.folder_for(runs, "night")
    store = store_of(folder)
    assert (store == folder / STORE) == is_here
    assert store.is_relative_to(folder if is_here else state)
    assert store == store_of(folder), "the same the next time"
    assert store.parent != store_of(registry.folder_for(runs / "others", "night")).parent


def test_where_all_comes_over_a_network_the_store_lies_with_its_cluster(
    tmp_path, monkeypatch, state
):
    mounts(monkeypatch, ("server:/", "/", "nfs4"))
    assert store_of(tmp_path / "folder") == tmp_path / "folder" / STORE


def test_a_mount_inside_another_counts(tmp_path, monkeypatch, state):
    local = tmp_path / "runs" / "local"
    mounts(monkeypatch, ("/dev/a", "/", "xfs"), ("h:/", local.parent, "nfs"), ("/dev/b", local, ""))
    assert store_of(local / "folder") == local / "folder" / STORE
    assert store_of(local.parent / "folder").is_relative_to(state)
    assert store_of(tmp_path / "runs-2") == tmp_path / "runs-2" / STORE


def test_it_goes_with_its_cluster(tmp_path, monkeypatch, state):
    folder = registry.folder_for(tmp_path / "runs", "night")
    mounts(monkeypatch, ("/dev/a", "/", "xfs"), ("h:/", tmp_path / "runs", "nfs"))
    folder.mkdir(parents=True)
    open_store(folder, create=True).close()
    assert [path.name for path in folder.iterdir()] == []
    assert store_of(folder).parent.stat().st_mode & 0o777 == 0o700
    remove(folder)
    assert not folder.exists()
    assert not store_of(folder).parent.exists()
    with pytest.raises(StoreError, match="is not there"):
        open_store(folder)


def test_each_host_has_a_store_and_the_last_one_counts(tmp_path, monkeypatch, state):
    """What a host did long ago is not taken for what is the case: the folders say that."""
    runs = tmp_path / "runs"
    folder = registry.folder_for(runs, f"{platform.node()}-{ENDED}-0123abcd")
    folder.mkdir(parents=True)
    mounts(monkeypatch, ("/dev/a", "/", "xfs"), ("h:/", runs, "nfs"))

    def go_to(host):
        """What this host has is where the other has its own."""
        if (tmp_path / "at").exists():
            state.rename(tmp_path / f"state of {(tmp_path / 'at').read_text()}")
        (tmp_path / "at").write_text(host)
        own = tmp_path / f"state of {host}"
        own.mkdir(exist_ok=True)
        own.rename(state)

    def kept():
        rebuild(folder)  # as `Cluster.attach` does
        store = open_store(folder, create=True)
        sign(folder, store)
        return closing(store)

    go_to("first")
    with kept() as store:
        store.submit(request(name="of the first"))
    with kept() as store:
        assert store.job(1).name == "of the first", "nobody else had the folder meanwhile"
        there = store_of(folder)
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / "another home")
    assert store_of(folder) == there, "whatever the environment of who asks on that host"
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: state)
    go_to("second")
    assert not is_here(folder)
    with kept() as store:
        assert store.jobs() == (), "no run's folder says anything of it"
        assert is_here(folder)
    go_to("first")
    assert not is_here(folder)
    with pytest.raises(StoreError, match="another host kept the cluster"):
        open_store(folder)
    sweep(runs)
    assert folder.exists(), "it may have unfinished jobs there"
    with kept() as store:
        assert store.jobs() == ()
        assert list(store.path.parent.glob(f"{STORE}.aside-1")), "and nothing was thrown away"
    sweep(runs)
    assert not folder.exists()


def test_a_new_cluster_has_nothing_of_one_that_was_removed_by_hand(tmp_path, monkeypatch, state):
    folder = registry.folder_for(tmp_path / "runs", "night")
    folder.parent.mkdir()
    mounts(monkeypatch, ("/dev/a", "/", "xfs"), ("h:/", folder.parent, "nfs"))
    make(folder)
    with closing(open_store(folder, create=True)) as store:
        sign(folder, store)
        store.submit(request(name="of the past"))
    shutil.rmtree(folder)
    make(folder)
    with closing(open_store(folder, create=True)) as store:
        assert store.jobs() == ()


@pytest.mark.parametrize("note", ["a1\n{}\n", "\n{}\n", "a1\n{}/server.sqlite\n", "{}", ""])
def test_a_note_in_a_folder_of_others_has_nothing_removed(tmp_path, state, note):
    """As in a cloned repository: what the note names is a store of that very folder, or nothing."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / STORE).write_text("weeks of work")
    folder = registry.folder_for(tmp_path / "runs", "night")
    folder.mkdir(parents=True)
    (folder / "store.id").write_text(note.format(mine))
    assert store_of(folder) == folder / STORE
    remove(folder)
    assert (mine / STORE).read_text() == "weeks of work"
    assert not folder.exists()


@pytest.mark.slow
def test_a_run_goes_on_while_the_file_server_stands_still(tmp_path):
    with network_disk(tmp_path) as disk:
        if disk is None:
            pytest.skip("no network file system can be mounted here: sshfs, or root's rights")
        plan = Plan.data_parallel(trace(net(), input_shape=(3, 8, 8)), 2)
        experiment = Experiment(
            plan=plan, steps=40, batch_size=8, data="synthetic", optimizer=wb.SGD(0.1)
        )
        with Cluster(2, directory=disk.root / "runs") as cluster:
            store = store_of(cluster.folder)
            assert store.exists()
            straight = losses(cluster.train(experiment))
            run = cluster.train(experiment)
            disk.stall()
            disk.go_on()
            assert losses(run) == straight
        assert not store.parent.exists()
