"""What a supervisor and its job server write for people: one file, which stays small."""

import os
from contextlib import suppress
from pathlib import Path

LOG = "supervisor.log"
LONGEST_TEXT = 2000
MOST_BYTES, KEPT_BYTES = 8 << 20, 1 << 20


def said(folder: Path) -> str:
    """The last that a supervisor, and the server that it started, wrote into its log."""
    return _end(folder / LOG, LONGEST_TEXT).decode(errors="replace")


def shorten(folder: Path, most: int = MOST_BYTES, kept: int = KEPT_BYTES) -> None:
    """Leaves the last whole lines of a log that has become long, at most `kept` bytes of them.

    Its writers go on: they append. What they write at that very moment may be lost.
    """
    path = folder / LOG
    with suppress(OSError):
        if path.stat().st_size > most:
            lines = _end(path, kept)
            lines = lines[lines.find(b"\n") + 1 :]
            os.truncate(path, 0)
            with path.open("ab") as log:
                log.write(lines)


def _end(path: Path, most: int) -> bytes:
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - most))
        return log.read()
    return b""
