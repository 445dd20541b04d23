"""The one way to write a file: whole, or not at all."""

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a new file's path; when the block ends well, that file takes the place of `path`.

    Its bytes are on the disk by then, and its name soon after: whenever power fails, the old file
    is there or the new one. Otherwise `path` stays as it was, and nothing else is left. Nobody but
    its owner may write into it, whatever the umask.

    Args:
        path: the file to be replaced, or made.
        durable: whether it outlasts a failure of power; a wait for the disk. Otherwise the file may
            be empty after one, and is whole after the end of any process.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~OTHERS_WRITE)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # Opened before the rename: whoever waits for the file may rename its folder at once.
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            part.replace(path)
            if durable:
                os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Writes a file whole or not at all.

    Args:
        path: the file, which is replaced if it is there.
        content: the file's content; text is written as UTF-8.
        durable: as for `replacing`.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    with replacing(path, durable=durable) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def make_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> bool:
    """Makes a file, whole, unless it is there; of several processes that try, one does.

    Args:
        path: the file.
        content: the file's content; text is written as UTF-8.
        mode: who may read and write it, but for what the umask takes away.

    Returns:
        Whether this call made it.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with replacing(own) as part:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink(missing_ok=True)
    return True
