"""What a disk may hold after a failure of power, at any moment of what this process writes.

`Power` notes everything that changes names below a folder, and what is flushed. Before each such
moment it makes copies of the folder as a disk might have it then:

    what was not flushed     is half as long as it should be
    names                    are as they are; and once more without those that were changed since
                             their own folder was last flushed, though later ones elsewhere stay

Source: what POSIX promises of fsync, and no more: a file's bytes and a folder's names are on the
disk once each was flushed by itself.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHANGES = ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "fsync")


class Power:
    """Copies of a folder, as a failure of power might leave it.

    Args:
        root: the folder that is written into.
        copies: a folder for the copies.
    """

    def __init__(self, root: Path, copies: Path) -> None:
        self.root, self.copies = root, copies
        self.states: list[Path] = []
        self._flushed: dict[int, tuple[int, int]] = {}
        self._unsure: list[tuple[Path, Path, bytes | None]] = []
        self._busy = False

    @contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Copies are made while the body runs, and once more at its end."""
        with monkeypatch.context() as patched:
            for name in CHANGES:
                patched.setattr(os, name, self._noting(name, getattr(os, name)))
            yield
        self._copy()

    def _noting(self, name, change):
        def noted(*given, **keywords):
            if self._busy or not self._concerns(given[0], keywords):
                return change(*given, **keywords)
            self._copy()
            before = self._before(given) if name in ("rename", "replace") else None
            done = change(*given, **keywords)
            if name == "fsync":
                self._note_flush(given[0])
            elif name in ("rename", "replace"):
                self._unsure.append((Path(given[0]), Path(given[1]), before))
            return done

        return noted

    def _concerns(self, what, keywords) -> bool:
        if isinstance(what, int):
            path = os.readlink(f"/proc/self/fd/{what}")
        else:
            folder = keywords.get("dir_fd")
            path = os.fspath(what)
            if folder is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return Path(path).is_relative_to(self.root)

    def _before(self, given) -> bytes | None:
        target = Path(given[1])
        return target.read_bytes() if target.is_file() else None

    def _note_flush(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._flushed[status.st_ino] = status.st_size, status.st_mtime_ns
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._unsure = [each for each in self._unsure if each[1].parent != folder]

    def _copy(self) -> None:
        self._busy = True
        try:
            self.states.append(self._copied())
            if self._unsure:
                without = self._copied()
                for source, target, before in reversed(self._unsure):
                    self._undo(without, source, target, before)
                self.states.append(without)
        finally:
            self._busy = False

    def _copied(self) -> Path:
        state = self.copies / f"{len(list(self.copies.iterdir())):04d}"
        shutil.copytree(self.root, state)
        for path in self.root.rglob("*"):
            if not path.is_file():
                continue
            status = path.stat()
            if self._flushed.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                os.truncate(state / path.relative_to(self.root), status.st_size // 2)
        return state

    def _undo(self, state: Path, source: Path, target: Path, before: bytes | None) -> None:
        source, target = (state / path.relative_to(self.root) for path in (source, target))
        if target.exists() and source.parent.exists():
            target.rename(source)
            if before is not None:
                target.write_bytes(before)
