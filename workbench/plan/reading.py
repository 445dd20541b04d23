"""Files that people give, read as text and as TOML: what is wrong is told with the file's name."""

import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # a plan of a model of a thousand layers has less than one
MOST_DEPTH = 64  # dotted keys can nest tables deeper than Python recurses


@contextmanager
def about(path: str | Path, error: type[ValueError]) -> Iterator[None]:
    """Names the file in errors about what it holds.

    Args:
        path: the file.
        error: the class of these errors.
    """
    try:
        yield
    except error as wrong:
        raise type(wrong)(f"{path}: {wrong}") from wrong


def bytes_of(path: str | Path, error: type[ValueError]) -> bytes:
    """Returns a file's bytes.

    Args:
        path: the file.
        error: the class of the error to raise where it cannot be taken.

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
    """Returns a file's text, in UTF-8; as `bytes_of`.

    Raises:
        ValueError: the causes of `bytes_of`, or it is no text; it is of the given type.
        OSError: the file cannot be read.
    """
    try:
        return bytes_of(path, error).decode()
    except UnicodeDecodeError as wrong:
        raise error(f"no text in UTF-8: {wrong}") from None


def toml_of(text: str, error: type[ValueError]) -> dict[str, Any]:
    """Returns what a text in TOML says.

    Args:
        text: the text.
        error: the class of the error to raise where it is no TOML.

    Raises:
        ValueError: it is not TOML, nested too deeply, or has a whole number beyond 64 bits; it is
            of the given type.
    """
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
