"""Files that are whole or not there at all, and folders that are read again once they changed."""

import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DATE_GRAIN_S = 2.0  # the coarsest dates: those of FAT
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a new file's path; when the block ends well, that file takes the place of `path`.

    Its bytes are on the disk by then, and its name soon after: whenever power fails, the old file
    is there or the new one. Otherwise `path` stays as it was, and nothing else is left. Nobody but
    its owner may write into it, whatever the umask.

    Args:
        path: the file to be replaced, or made.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~OTHERS_WRITE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # Opened before the rename: whoever waits for the file may rename its folder at once.
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            part.replace(path)
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all.

    Args:
        path: the file, which is replaced if it is there.
        content: the file's content; text is written as UTF-8.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


class FolderChanges:
    """Whether files have come into a folder: one look at its date costs next to nothing.

    A date is as coarse as seconds, and may be of another host's clock: a folder counts as changed
    until its date has been the same for longer than that here.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._date, self._since, self._settled = -1, 0.0, False

    def seen(self) -> bool:
        """Whether the folder is to be read, and may have changed since it was last asked.

        Raises:
            OSError: there is no such folder, or it cannot be looked at.
        """
        date, now = os.stat(self._folder).st_mtime_ns, time.monotonic()
        if date != self._date:
            self._date, self._since, self._settled = date, now, False
        was_settled = self._settled
        self._settled = now - self._since > DATE_GRAIN_S
        return not was_settled
