"""A crash leaves the old file or the new one, and nobody else may write into either."""

import os
import stat
from pathlib import Path

import pytest

from workbench.store import files
from workbench.store.files import FolderChanges, replacing, write_whole


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


def test_a_file_that_came_within_the_same_coarse_second_is_seen(tmp_path, monkeypatch):
    """As over SFTP, whose dates are whole seconds, and of the server's clock."""
    now = [100.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    os.utime(tmp_path, (50, 50))
    changes = FolderChanges(tmp_path)
    assert changes.seen()
    now[0] += 0.5
    (tmp_path / "file").touch()
    os.utime(tmp_path, (50, 50))  # the same date as before the file
    assert changes.seen()
    now[0] += 2.0
    assert changes.seen(), "it is read once more after the date has become old"
    assert not changes.seen()
    (tmp_path / "another").touch()
    assert changes.seen()
