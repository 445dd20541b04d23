"""The one way to write a file: whole, or not at all.

Files that people give, read as text and as TOML: what is wrong is told with the file's name.
"""

import errno
import os
import stat
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def replacing(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yields a new file's path; when the block ends well, that file takes the place of `path`.

    Its bytes are on the disk by then, and its name soon after: whenever power fails, the old file
    is there or the new one. Otherwise `path` stays as it was, and nothing else is left. Nobody but
    its owner may write into it, whatever the umask.

    Args:
        durable: whether it outlasts a failure of power; a wait for the disk. Otherwise the file may
            be empty after one, and is whole after the end of any process.
        shared: whether others may write into it whom the umask, or the old file's mode, lets.
    """
    part = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        _close(part, path if shared else None, durable=durable)
        # Opened before the rename: whoever waits for the file may rename its folder at once.
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            part.replace(path)
            if durable:
                _sync_folder(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):  # it was renamed, or what went wrong is being told
            part.unlink()


def _close(part: Path, like: Path | None, *, durable: bool) -> None:
    """Gives a new file its mode, that of an older one where there is one, and flushes it."""
    descriptor = os.open(part, os.O_RDONLY)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if like is None:
            wanted = mode & ~OTHERS_WRITE
        else:
            wanted = stat.S_IMODE(like.stat().st_mode) if like.exists() else mode
        if wanted != mode:
            with suppress(OSError):  # a file system without modes
                os.fchmod(descriptor, wanted)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: int) -> None:
    """Returns once the names in an open folder are on the disk, where that can be had."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems that flush no folders
            raise


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Writes a file whole or not at all.

    Args:
        durable: whether it outlasts a failure of power; see `replacing`.
    """
    with replacing(path, durable=durable) as part:
        part.write_bytes(_packed(content))


def save_text(path: Path, text: str) -> None:
    """Writes a file that a person has named: whole, where that is possible.

    A link leads to the file that is replaced. What is no file, as "/dev/stdout", or lies where no
    other file can be made, is written to as it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        target.write_bytes(_packed(text))
        return
    try:
        with replacing(target, shared=True) as part:
            part.write_bytes(_packed(text))
    except OSError as error:
        error.filename = str(path)  # not that of the part
        raise


def make_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> bool:
    """Makes a file, whole, unless it is there; of several processes that try, one does.

    Args:
        mode: who may read and write it, but for what the umask takes away.

    Returns:
        Whether this call made it.
    """
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(_packed(content))
            file.flush()
            os.fsync(file.fileno())
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # as above
            own.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync_folder(folder)
    finally:
        os.close(folder)
    return True


def _packed(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


MOST_BYTES = 64 << 20  # a plan of a model of a thousand layers has less than one
MOST_DEPTH = 64  # dotted keys can nest tables deeper than Python recurses


@contextmanager
def about(path: str | Path, error: type[ValueError]) -> Iterator[None]:
    """Names the file in errors about what it holds."""
    try:
        yield
    except error as wrong:
        raise type(wrong)(f"{path}: {wrong}") from wrong


def bytes_of(path: str | Path, error: type[ValueError]) -> bytes:
    """Returns a file's bytes.

    Raises:
        ValueError: it is no file of its own, or too large; it is of the given type.
        OSError: the file cannot be read.
    """
    # Without waiting for somebody who writes, as the other end of a pipe would have it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise error(f"no file of at most {MOST_BYTES >> 20} MiB")
        return file.read(MOST_BYTES)


def text_of(path: str | Path, error: type[ValueError]) -> str:
    """Returns a file's text, in UTF-8; as `bytes_of`."""
    try:
        return bytes_of(path, error).decode()
    except UnicodeDecodeError as wrong:
        raise error(f"no text in UTF-8: {wrong}") from None


def toml_of(text: str, error: type[ValueError]) -> dict[str, Any]:
    """Returns what a text in TOML says."""
    try:
        content = tomllib.loads(text)
    except ValueError as wrong:  # a number of thousands of digits is none of tomllib's own errors
        raise error(f"not TOML: {wrong}") from None
    except RecursionError:
        raise error("not TOML: it is nested too deeply") from None
    left: list[tuple[object, int]] = [(content, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict | list):
            if depth > MOST_DEPTH:
                raise error("not TOML: it is nested too deeply")
            parts = value.values() if isinstance(value, dict) else value
            left += [(part, depth + 1) for part in parts]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise error(f"not TOML: a whole number beyond 64 bits, of {value.bit_length()}")
    return content
