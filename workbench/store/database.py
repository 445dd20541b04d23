"""One SQLite file, for several processes and threads: connections, transactions, errors.

The tables stand here too, and how values become their rows.
"""

import json
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from workbench.store.errors import StoreDamaged, StoreError
from workbench.store.process import ProcessIdentity
from workbench.store.record import AttemptRecord, EngineRecord, ErrorRecord, JobRecord

PATIENCE_S = 10.0
RETRY_S = 0.005
LOG_BYTES = 16 << 20  # the write-ahead log is cut to this after it has grown

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

APPLICATION = 0x77626A73  # SQLite's header says whose file it is
VERSION = 3

# Large values, which lists of jobs do without, have a table of their own.
APART = ("packed", "keywords")
JOB_COLUMNS = tuple(each.name for each in fields(JobRecord) if each.name not in APART)
ENGINE_COLUMNS = tuple(each.name for each in fields(EngineRecord))

SCHEMA = (
    "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    f"{', '.join(name for name in JOB_COLUMNS if name != 'id')})",
    "CREATE INDEX jobs_by_state ON jobs (state)",
    "CREATE TABLE packed (job, what, bytes BLOB, PRIMARY KEY (job, what)) WITHOUT ROWID",
    'CREATE TABLE engines ("index" INTEGER PRIMARY KEY, '
    f"{', '.join(name for name in ENGINE_COLUMNS if name != 'index')})",
    "CREATE TABLE commands "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, kind, job, payload, at, done_at, error)",
    "CREATE INDEX commands_by_done ON commands (done_at)",
    "CREATE TABLE events "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, time, level, kind, text, job, engine)",
    "CREATE INDEX events_by_job ON events (job)",
    # Messages of no job have job 0: no two of SQLite's NULLs are the same key.
    "CREATE TABLE ledger (job, direction, messages, bytes, PRIMARY KEY (job, direction)) "
    "WITHOUT ROWID",
    "CREATE TABLE owners (boot, pid, started, PRIMARY KEY (boot, pid, started)) WITHOUT ROWID",
    "CREATE TABLE meta (key PRIMARY KEY, value) WITHOUT ROWID",
)


def encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job or an engine as SQLite takes them."""
    return {name: _encoded(name, value) for name, value in values.items()}


def _encoded(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("places", "held"):
        return json.dumps(list(value))
    if name in ("owner", "error", "process"):
        return json.dumps(asdict(value))
    if name in ("attempts", "processes"):
        return json.dumps([asdict(each) for each in value])
    return value


def job_of(row: sqlite3.Row, packed: Mapping[str, bytes]) -> JobRecord:
    """Returns the job that a row holds, with what is packed."""
    values = {name: _decoded(name, row[name]) for name in JOB_COLUMNS}
    return JobRecord(**values | {what: packed.get(what, b"") for what in APART})


def _decoded(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("places", "held"):
        return tuple(json.loads(value))
    if name in ("owner", "process"):
        return ProcessIdentity(**json.loads(value))
    if name == "processes":
        return tuple(ProcessIdentity(**each) for each in json.loads(value))
    if name == "error":
        return ErrorRecord(**json.loads(value))
    if name == "attempts":
        return tuple(
            AttemptRecord(**{**each, "places": tuple(each["places"])}) for each in json.loads(value)
        )
    return bool(value) if name in ("preemptible", "needs_weights") else value


def engine_of(row: sqlite3.Row) -> EngineRecord:
    """Returns the engine that a row holds."""
    values = {name: _decoded(name, row[name]) for name in ENGINE_COLUMNS}
    return EngineRecord(**{**values, "is_assistant": bool(values["is_assistant"])})


def require_known(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raises ValueError where a field is none of those that may change."""
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{what} has no {unknown} to change; there are {sorted(known)}")


def require_state(given: Mapping[str, Any], valid: Any) -> None:
    """Raises ValueError where the state is none of a literal's."""
    if "state" in given and given["state"] not in get_args(valid):
        raise ValueError(f"a state is one of {get_args(valid)}, got {given['state']!r}")


def marks(values: Collection[Any]) -> str:
    """Returns '?, ?, ?': a place in a statement for each value."""
    return ", ".join("?" * len(values))


class Database:
    """A file that was made by this class, opened.

    Each thread has a connection of its own. A change is a transaction that begins with the
    right to write, so none fails half-way because another process wrote meanwhile; what a
    process that is killed had committed is there.

    Args:
        create: whether to make the file, readable by its owner only, where it is not there.
        read_only: whether to change nothing; that is so, too, where its folder cannot be written.
        patience_s: the seconds to wait for others that write.

    Raises:
        StoreDamaged: the file is no database, or a damaged one.
        StoreError: the file is not there, of another version, or cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = False,
        read_only: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.path = Path(path).absolute()
        self._patience_s = patience_s
        self._local = threading.local()
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()
        if create and not read_only:
            self._make()
        elif not self.path.exists():
            raise StoreError(f"{self.path} is not there; a cluster of this name runs nowhere here")
        folder = self.path.parent
        self.read_only = read_only or not (
            os.access(self.path, os.W_OK) and os.access(folder, os.W_OK)
        )
        with self._told():
            self._require_version()

    def close(self) -> None:
        """Closes every thread's connection; the next use opens another."""
        for connection in list(self._open):
            connection.close()

    def changed(self) -> bool:
        """Returns whether others wrote since this thread last asked; its own writing is no change.

        Takes microseconds: one number of the file's is read, no table.
        """
        with self._told():
            connection = self._connection()
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            before, connection.seen = connection.seen, version
        return before != version

    def check(self) -> None:
        """Reads the whole file.

        Raises:
            StoreDamaged: not all of the file is as it should be.
        """
        for (found,) in self._rows("PRAGMA quick_check(1)"):
            if found != "ok":
                raise StoreDamaged(self._text(f"is damaged: {found}"))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Begins a transaction that may write: all of it is done, or none."""
        if self.read_only:
            raise StoreError(self._text("was opened to be read only: nothing in it can change"))
        with self._told():
            connection = self._connection()
            try:
                # In here: an interrupt that comes while it waits is raised once it has begun.
                self._patiently(connection, "BEGIN IMMEDIATE")
                yield connection
                self._patiently(connection, "COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _rows(self, sql: str, arguments: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Returns what a query finds, in one state of the file."""
        with self._told():
            return self._patiently(self._connection(), sql, arguments)

    def _patiently(
        self, connection: sqlite3.Connection, sql: str, arguments: Sequence[Any] = ()
    ) -> list[sqlite3.Row]:
        """Tries again where SQLite refuses at once instead of waiting for others."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return connection.execute(sql, arguments).fetchall()
            except sqlite3.OperationalError as error:
                if _code(error) not in _BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_S)

    def _connection(self) -> "_Connection":
        """Returns this thread's connection; a process that was forked has its own."""
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None or found.is_closed or found.pid != os.getpid():
            found = self._local.connection = self._connect()
            self._open.add(found)
        return found

    def _connect(self) -> "_Connection":
        modes = ["mode=ro", "immutable=1"] if self.read_only else ["mode=rw"]
        for mode in modes:
            connection = sqlite3.connect(
                f"file:{quote(str(self.path))}?{mode}",
                uri=True,
                timeout=self._patience_s,
                isolation_level=None,
                check_same_thread=False,  # `close` closes those of other threads
                factory=_Connection,
            )
            connection.row_factory = sqlite3.Row
            try:
                self._patiently(connection, "SELECT 1 FROM sqlite_master")
                break
            except sqlite3.OperationalError as error:
                # A reader needs files beside it, which a folder that is read-only has no room for.
                connection.close()
                if _code(error) != sqlite3.SQLITE_CANTOPEN or mode == modes[-1]:
                    raise
            except sqlite3.DatabaseError:
                connection.close()
                raise
        if not self.read_only:
            # A crash of the machine may lose the last moments, never the file; one of a process,
            # nothing.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        return connection

    def _make(self) -> None:
        """Makes the file with its tables, unless it is there: whole at once, and by one of several.

        Raises:
            StoreError: the file's folder has no room, or is not there.
        """
        part = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.part")
        try:
            if self.path.exists():
                return
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with self._told(), closing(sqlite3.connect(part, isolation_level=None)) as connection:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.execute("PRAGMA journal_mode = WAL")
            with suppress(FileExistsError):
                os.link(part, self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)

    def _require_version(self) -> None:
        connection = self._connection()
        ((application,), (version,)) = (
            connection.execute(f"PRAGMA {name}").fetchone()
            for name in ("application_id", "user_version")
        )
        if application != APPLICATION:
            raise StoreError(self._text("holds no cluster's jobs, but something else"))
        if version != VERSION:
            raise StoreError(
                self._text(
                    f"has version {version}, and this workbench reads version {VERSION}: use the "
                    "workbench that made it, or start a cluster in another directory"
                )
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Says SQLite's errors with the file's name, and what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = _code(error)
            if code in _DAMAGED:
                text = self._text(
                    f"is damaged ({error}); Cluster.attach makes it again from the folders of its "
                    "runs, and keeps it under another name"
                )
                raise StoreDamaged(text) from error
            if (advice := _ADVICE.get(code)) is None:
                raise
            raise StoreError(self._text(f"{advice} ({error})")) from error

    def _text(self, what: str) -> str:
        return f"{self.path} {what}"


class _Connection(sqlite3.Connection):
    """One thread's; closed when the thread has ended and nobody refers to it.

    Attributes:
        seen: the file's version when `changed` was last asked.
        is_closed: whether it was closed.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.pid, self.seen, self.is_closed = os.getpid(), None, True
        super().__init__(*args, **keywords)  # raises where there is no such file any more
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        super().close()

    # Bound here: when the interpreter ends, `os` may have gone before.
    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if self.pid == getpid() and not self.is_closed:
            self.close()


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary code of an error; 0 where it is of Python's module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


_ADVICE = {
    sqlite3.SQLITE_BUSY: "is locked by another process for too long: `fuser` says by which",
    sqlite3.SQLITE_LOCKED: "is locked by another process for too long: `fuser` says by which",
    sqlite3.SQLITE_FULL: "cannot grow, the disk is full: make room there; nothing was lost",
    sqlite3.SQLITE_IOERR: "could not be read or written: look for room on its disk, and its health",
    sqlite3.SQLITE_READONLY: "cannot be written: see who owns it, and how its folder is mounted",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: see who owns it, and how its folder is mounted",
    sqlite3.SQLITE_PERM: "cannot be opened: see who owns it",
}
