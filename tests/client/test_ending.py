"""Which clusters are known, and what is removed of those that have ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.client.lifecycle import STORE, sweep
from workbench.store import registry
from workbench.store.cluster_spec import FILE
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
