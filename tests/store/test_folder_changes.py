"""A folder is read as often as is needed, and no more."""

import os

from workbench.store import folder_changes
from workbench.store.folder_changes import FolderChanges


def test_a_file_that_came_within_the_same_coarse_second_is_seen(tmp_path, monkeypatch):
    """As over SFTP, whose dates are whole seconds, and of the server's clock."""
    now = [100.0]
    monkeypatch.setattr(folder_changes.time, "monotonic", lambda: now[0])
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
