"""The one crash-safe way to write a file: whole, or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a new file's path; when the block ends well, that file takes the place of `path`.

    Its bytes are on the disk by then. Otherwise `path` stays as it was, and nothing else is left.

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
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
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
