"""A second copy of the store, in case that the first is damaged."""

import os
import sqlite3
import time
from contextlib import closing, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from workbench.store.database import Database
from workbench.store.errors import StoreDamaged, StoreError


class Backups(Database):
    """The store, copied now and then."""

    def backup(self, *, every_s: float = 0.0) -> bool:
        """Copies the file to one beside it, `<name>.backup`, while others go on using it.

        A copy that is not whole does not replace an earlier one.

        Args:
            every_s: do nothing if the last copy is younger than that.

        Returns:
            Whether it was copied.

        Raises:
            StoreDamaged: the file is damaged.
            StoreError: there is no room for the copy.
        """
        target = backup_of(self.path)
        with suppress(FileNotFoundError):
            if 0 <= time.time() - target.stat().st_mtime < every_s:
                return False
        part = target.with_name(f".{target.name}.part")
        try:
            with self._told():
                part.unlink(missing_ok=True)
                os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
                with closing(sqlite3.connect(part)) as copy:
                    self._connection().backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
                Database(part, read_only=True).check()
            _sync(part)
            part.replace(target)
        except OSError as error:
            raise StoreError(f"{target} cannot be written: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return True


def backup_of(path: str | Path) -> Path:
    """Where the copy of a store is."""
    path = Path(path).absolute()
    return path.with_name(f"{path.name}.backup")


def restore(path: str | Path) -> Path:
    """Puts the newest backup in the place of a damaged store; what came after it is lost.

    To be called while no process has the file open. A job that was started since the backup is
    queued again in it: its folder says that it was.

    Returns:
        Where the damaged file is now.

    Raises:
        StoreError: the file is whole, or there is no backup that is.
    """
    path = Path(path).absolute()
    backup = backup_of(path)
    if not backup.exists():
        raise StoreError(
            f"{path} has no backup; keep it under another name, and start a cluster in its place"
        )
    Database(backup, read_only=True).check()
    if _is_whole(path):
        raise StoreError(f"{path} is not damaged: nothing was restored")
    kept = next(
        each for n in count(1) if not (each := path.with_name(f"{path.name}.damaged-{n}")).exists()
    )
    part = path.with_name(f".{path.name}.part")
    with closing(os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb")) as f:
        f.write(backup.read_bytes())
    with closing(sqlite3.connect(part)) as copy:
        copy.execute("PRAGMA journal_mode = WAL")
    _sync(part)
    # The log of changes belongs to the damaged file, and would damage the other one.
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{kept}{suffix}")
    part.replace(path)
    return kept


def mend(path: str | Path) -> str:
    """Restores a store if it is damaged; to be called before any process opens it.

    Returns:
        What was done, for people; "" where it is whole, or not there yet.

    Raises:
        StoreError: it is damaged, and there is no backup that is whole.
    """
    if not Path(path).exists() or _is_whole(path):
        return ""
    kept = restore(path)
    saved_at = datetime.fromtimestamp(backup_of(path).stat().st_mtime)
    return (
        f"{Path(path).name} was damaged; the backup of {saved_at:%d %b %H:%M} is in its place, and "
        f"what was damaged in {kept.name}"
    )


def _is_whole(path: str | Path) -> bool:
    try:
        Database(path).check()
    except StoreDamaged:
        return False
    return True


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
