"""Which clusters are known, and what is removed of those that have ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.client.cluster import Cluster
from workbench.client.lifecycle import make, sweep
from workbench.store import registry
from workbench.store.cluster_spec import FILE, HERE, ClusterSpec, EngineDevice
from workbench.store.cluster_store import STORE
from workbench.store.errors import ClusterError
from workbench.store.record import Request
from workbench.store.store import Store


def folder(directory: Path, name: str) -> Path:
    made = registry.folder_for(directory, name)
    made.mkdir()
    (made / FILE).write_text("{}")
    return made


@pytest.fixture
def ended() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_an_ended_process_left_is_swept(tmp_path, ended):
    mine = folder(tmp_path, registry.new_name())
    orphan = folder(tmp_path, registry.new_name().replace(f"-{os.getpid()}-", f"-{ended}-"))
    other = folder(tmp_path, f"elsewhere-{ended}-00000000")
    named = folder(tmp_path, "named")
    unfinished = folder(tmp_path, registry.new_name().replace(f"-{os.getpid()}-", f"-{ended}-"))
    Store(unfinished / STORE, create=True).submit(
        Request(kind="train", name="a run", task="nowhere:nothing", engines=1)
    )
    damaged = folder(tmp_path, registry.new_name().replace(f"-{os.getpid()}-", f"-{ended}-"))
    (damaged / STORE).write_text("no database")
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, named, unfinished, damaged])
    assert not orphan.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_what_another_user_left_is_theirs(tmp_path, ended):
    name = registry.new_name().replace(f"-{os.getpid()}-", f"-{ended}-")
    theirs = folder(tmp_path, name)
    os.chown(theirs, 12345, 12345)
    sweep(tmp_path)
    assert theirs.exists()


def test_of_two_starts_of_one_name_the_second_leaves_the_first_alone(tmp_path):
    first = registry.folder_for(tmp_path, "one")
    make(first)
    with pytest.raises(ClusterError, match="a cluster is being started in"):
        Cluster(1, directory=tmp_path, name="one")
    (first / FILE).write_text("{}")
    with pytest.raises(ClusterError, match=r"there is a cluster 'one'.* Cluster.attach\('one'\)"):
        Cluster(1, directory=tmp_path, name="one")
    assert (first / FILE).read_text() == "{}"


@pytest.fixture
def planted(tmp_path, monkeypatch) -> Path:
    """A cluster's folder that came with a repository; it says what is to be executed."""
    folder = tmp_path / "overnight"
    folder.mkdir(mode=0o700)
    spec = ClusterSpec(
        devices=(EngineDevice("cpu", "here", "cpu", (), 1, 1 << 30),) * 2,
        sites=(HERE, HERE),
        address="127.0.0.1",
        environment={"PLANTED": "1"},
        server="planted",
    )
    spec.save(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_name_is_no_folder_that_happens_to_be_here(planted):
    with pytest.raises(ClusterError, match="no cluster 'overnight'"):
        Cluster.attach("overnight")


@pytest.mark.parametrize("given", [Path("overnight"), "./overnight"])
def test_a_folder_from_elsewhere_is_executed_for_nobody_who_does_not_ask_for_it(planted, given):
    with pytest.raises(ClusterError, match="none of the clusters that you have started"):
        Cluster.attach(given)
    assert not list(planted.glob("*.sqlite*"))


def test_a_folder_into_which_others_may_write_is_never_executed(planted):
    planted.chmod(0o770)
    with pytest.raises(ClusterError, match="others may write there"):
        Cluster.attach(planted, trust=True)
    planted.chmod(0o700)
    registry.require_trusted(planted, trust=True)
    (planted / FILE).chmod(0o666)
    with pytest.raises(ClusterError, match="others may write there"):
        registry.require_trusted(planted, trust=True)


def test_clusters_are_found_by_name_and_by_folder(tmp_path):
    one, other = folder(tmp_path, "one"), folder(tmp_path, "other")
    for each in (one, other):
        registry.enter(each)
    assert registry.find("one") == registry.find(one) == one
    assert {"one": one, "other": other}.items() <= dict(registry.known()).items()
    with pytest.raises(ClusterError, match=r"no cluster 'third'; .* 'one', 'other'"):
        registry.find("third")
    registry.remove(one)
    with pytest.raises(ClusterError, match="no cluster 'one'"):
        registry.find("one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    registry.remove(registry.folder_for(elsewhere, "other"))  # another one of this name
    assert registry.find("other") == other
    (other / FILE).unlink()
    assert "other" not in dict(registry.known())


@pytest.mark.parametrize("name", ["", "a/b", "..", "two words", "-x"])
def test_names_are_those_that_folders_can_have(tmp_path, name):
    with pytest.raises(ValueError, match="a cluster's name has letters"):
        registry.folder_for(tmp_path, name)
