"""The one crash-safe way to write a file: whole, or not at all."""

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
