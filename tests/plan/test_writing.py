"""A crash leaves the old file or the new one, and nobody else may write into either."""

import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from tests.power import Power
from workbench.plan.io.files import make_whole, replacing, save_text, write_whole


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What reaches the disk, in its order: "bytes", "name" (the rename) and "folder"."""
    found, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor):
        found.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "bytes")
        fsync(descriptor)

    def renamed(path, target):
        found.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    return found


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_anything_else(tmp_path, log):
    write_whole(tmp_path / "file", "text")
    assert log == ["bytes", "name", "folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_fails_leaves_the_old_file_alone(tmp_path):
    write_whole(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "file") as part:
        part.write_text("half \udcff", "utf-8")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_the_group_may_not_write_into_it_under_any_umask(tmp_path):
    before = os.umask(0o002)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_power_that_fails_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    folder.mkdir()
    copies.mkdir()
    power, texts = Power(folder, copies), ["first " * 100, "second", "third " * 50]
    with power.watched(monkeypatch):
        write_whole(folder / "file", texts[0])
    for old, new in pairwise(texts):
        first = len(power.states)
        with power.watched(monkeypatch):
            write_whole(folder / "file", new)
        during, (after,) = power.states[first:-1], power.states[-1:]
        assert {(state / "file").read_text() for state in during} == {old, new}
        assert (after / "file").read_text() == new


def test_a_file_that_is_made_once_is_not_there_or_whole(tmp_path, monkeypatch):
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    folder.mkdir()
    copies.mkdir()
    power = Power(folder, copies)
    with power.watched(monkeypatch):
        assert make_whole(folder / "key", "secret", mode=0o600)
    there = [state / "key" for state in power.states if (state / "key").exists()]
    assert {path.read_text() for path in there} == {"secret"}
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    assert not make_whole(folder / "key", "another")
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").read_text() == "secret"


def test_a_file_that_nobody_waits_for_is_whole_without_a_flush(tmp_path, log):
    write_whole(tmp_path / "file", "text", durable=False)
    assert log == ["name"]


def test_what_a_person_names_is_written_to(tmp_path):
    """Through links, into pipes, and as open to others as it was."""
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("old")
    real.chmod(0o664)
    link.symlink_to(real)
    save_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o664
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_text(pipe, "said")
    assert os.read(reader, 10) == b"said"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(FileNotFoundError, match=r"none/x.svg'$"):
        save_text(tmp_path / "none" / "x.svg", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]


def test_a_file_system_without_modes_or_flushed_folders_will_do(tmp_path, monkeypatch):
    def refuses(descriptor, mode):
        raise PermissionError(1, "Operation not permitted")

    def flushes(descriptor, fsync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fchmod", refuses)
    monkeypatch.setattr(os, "fsync", flushes)
    before = os.umask(0)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert make_whole(tmp_path / "key", "secret")
    assert (tmp_path / "file").read_text() == "text"
