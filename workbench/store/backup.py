"""Puts a backup of the store in the place of a damaged file."""

import sqlite3
from contextlib import closing, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from workbench.store.database import Database, backup_of
from workbench.store.errors import StoreDamaged, StoreError
from workbench.store.files import replacing


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
    with replacing(path) as part:
        part.touch(mode=0o600)
        part.write_bytes(backup.read_bytes())
        with closing(sqlite3.connect(part)) as copy:
            copy.execute("PRAGMA journal_mode = WAL")
        # The log of changes belongs to the damaged file, and would damage the other one.
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{kept}{suffix}")
    return kept


def mend(path: str | Path) -> str:
    """Restores a store if it is damaged; to be called before any process opens it.

    Returns:
        What was done, for people; "" where it is whole, or not there yet.

    Raises:
        StoreError: the file is damaged, and there is no backup that is whole.
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
