"""The state of a cluster: jobs, engines, events, commands, and all else that outlives processes."""

import json
import sqlite3
import time
from collections.abc import Collection, Mapping
from typing import Any, get_args

from workbench.store.database import (
    ENGINE_COLUMNS,
    JOB_COLUMNS,
    Database,
    encoded,
    engine_of,
    job_of,
    marks,
    require_known,
    require_state,
)
from workbench.store.errors import ControlMessageTooLarge, StoreError
from workbench.store.process import ProcessIdentity
from workbench.store.record import (
    ACTIVE,
    ENDED,
    LARGEST_MESSAGE_BYTES,
    CommandRecord,
    EngineRecord,
    EngineState,
    EventRecord,
    JobRecord,
    JobState,
    Level,
    MessageDirection,
    Request,
    Tally,
)

QUEUED: tuple[JobState, ...] = ("queued",)
EVENTS_KEPT = COMMANDS_KEPT = 20_000
JOBS_KEPT = 10_000


class Store(Database):
    """Jobs and engines in one SQLite file, used by notebooks, the job server and the supervisor.

    Every method is one short transaction; all may be called from any thread of any process. What
    `Database` says is raised may be raised by any of them.
    """

    def submit(self, request: Request, *, number: int | None = None) -> int:
        """Queues a job; returns its number. The last 10,000 are kept, and all unfinished ones.

        Args:
            number: the number that it is to have, which no job has; None: the next one.
        """
        names = [name for name in JOB_COLUMNS if name in Request.__dataclass_fields__]
        values = encoded({name: getattr(request, name) for name in names})
        values |= {"state": "queued", "attempt": 0, "held": "[]", "attempts": "[]"}
        values |= {"processes": "[]", "step": 0, "reason": "", "requested": "", "ran_s": 0.0}
        values["submitted_at"] = time.time()
        values |= {} if number is None else {"id": number}
        packed = {"packed": request.packed, "keywords": request.keywords}
        with self._writing() as connection:
            cursor = connection.execute(
                f"INSERT INTO jobs ({', '.join(values)}) VALUES ({marks(values)})",
                tuple(values.values()),
            )
            assert cursor.lastrowid is not None
            connection.executemany(
                "INSERT INTO packed VALUES (?, ?, ?)",
                [(cursor.lastrowid, what, each) for what, each in packed.items()],
            )
            _forget(connection, cursor.lastrowid - JOBS_KEPT)
        return cursor.lastrowid

    def job(self, number: int) -> JobRecord:
        """Returns one job, whole.

        Raises:
            StoreError: there is no job of this number.
        """
        for row in self._rows("SELECT * FROM jobs WHERE id = ?", (number,)):
            packed = self._rows("SELECT what, bytes FROM packed WHERE job = ?", (number,))
            return job_of(row, {what: each for what, each in packed})
        raise StoreError(self._text(f"holds no job {number}"))

    def jobs(
        self,
        *,
        states: Collection[JobState] | None = None,
        tag: str | None = None,
        after: int = 0,
    ) -> tuple[JobRecord, ...]:
        """Returns jobs in the order in which they were submitted.

        `packed` and `keywords` are empty: `job` has them.

        Args:
            states: the states of the jobs; None: any.
            tag: the sweep of the jobs; None: any.
        """
        chosen: list[str] = []
        arguments: list[Any] = []
        if after:
            chosen.append("id > ?")
            arguments.append(after)
        if states is not None:
            chosen.append(f"state IN ({marks(states)})")
            arguments += states
        if tag is not None:
            chosen.append("tag = ?")
            arguments.append(tag)
        where = f"WHERE {' AND '.join(chosen)}" if chosen else ""
        rows = self._rows(f"SELECT * FROM jobs {where} ORDER BY id", arguments)
        return tuple(job_of(row, {}) for row in rows)

    def update(
        self, number: int, *, only_in: Collection[JobState] | None = None, **fields: Any
    ) -> bool:
        """Changes fields of a job, unless it is in another state than `only_in`.

        Returns:
            Whether it was changed.

        Raises:
            ValueError: a field or a state is unknown.
        """
        return self.update_all({number: fields}, only_in=only_in) == 1

    def update_all(
        self,
        changes: Mapping[int, Mapping[str, Any]],
        *,
        only_in: Collection[JobState] | None = None,
    ) -> int:
        """Does what `update` does for several jobs at once; returns how many were changed."""
        with self._writing() as connection:
            return sum(
                _set(connection, number, only_in, fields) for number, fields in changes.items()
            )

    def repack(self, number: int, packed: bytes) -> None:
        """Has a job be another experiment from its next attempt on."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE packed SET bytes = ? WHERE job = ? AND what = 'packed'", (packed, number)
            )

    def claim(
        self,
        number: int,
        attempt: int,
        places: Collection[int],
        *,
        only_in: Collection[JobState] = QUEUED,
        **fields: Any,
    ) -> bool:
        """Begins the attempt that follows `attempt`, on engines that are taken with it.

        However many servers try, one succeeds: an attempt starts at most once.

        Args:
            attempt: the number of the attempt that it had last, as the caller knows it.
            places: the engine of each rank: each idle, held by this job from an earlier attempt, or
                by the lease that it runs under.

        Returns:
            Whether the caller may start it now; False where somebody else was first, or an
            engine is not free any more.
        """
        with self._writing() as connection:
            query = "SELECT attempt, lease, started_at FROM jobs WHERE id = ?"
            found = connection.execute(query, (number,)).fetchone()
            if found is None or found["attempt"] != attempt:
                return False
            if not _are_free(connection, number, found["lease"], places):
                return False
            now = time.time()
            began: dict[str, Any] = {"attempt": attempt + 1, "began_at": now}
            began |= {
                "state": "starting",
                "held": tuple(places),
                "processes": (),
            }
            began["started_at"] = now if found["started_at"] is None else found["started_at"]
            if not _set(connection, number, only_in, _ran(connection, number) | began | fields):
                return False
            if found["lease"] is None:
                _take(connection, number, places)
        return True

    def release(
        self,
        number: int,
        state: JobState,
        *,
        only_in: Collection[JobState] | None = None,
        **fields: Any,
    ) -> bool:
        """Takes a job's engines from it, which are idle then, and gives it another state.

        Args:
            state: the state that it has from then on: an ended one, "queued" again or "paused".
            only_in: the states in which anything is changed; None: any.

        Returns:
            Whether it was changed.
        """
        ended_at = time.time() if state in ENDED else None
        left = {"state": state, "held": (), "processes": (), "ended_at": ended_at}
        with self._writing() as connection:
            if not _set(connection, number, only_in, left | _ran(connection, number) | fields):
                return False
            _leave(connection, number)
        return True

    def engines(self) -> tuple[EngineRecord, ...]:
        """Returns all engines, by index."""
        return tuple(map(engine_of, self._rows('SELECT * FROM engines ORDER BY "index"')))

    def set_engine(self, index: int, **fields: Any) -> None:
        """Changes fields of an engine, or adds it; `since` follows its state by itself.

        Raises:
            ValueError: a field or a state is unknown.
        """
        require_known(fields, set(ENGINE_COLUMNS) - {"index"}, "an engine")
        require_state(fields, EngineState)
        query = 'SELECT * FROM engines WHERE "index" = ?'
        with self._writing() as connection:
            row = connection.execute(query, (index,)).fetchone()
            before = EngineRecord(index=index) if row is None else engine_of(row)
            if row is None or fields.get("state", before.state) != before.state:
                fields = {"since": time.time(), **fields}
            values = {name: getattr(before, name) for name in ENGINE_COLUMNS} | fields
            names = ", ".join(f'"{name}"' for name in values)
            connection.execute(
                f"INSERT OR REPLACE INTO engines ({names}) VALUES ({marks(values)})",
                tuple(encoded(values).values()),
            )

    def note_health(self, found: Mapping[int, tuple[float, int, int]]) -> None:
        """Writes down how engines do, of all in one transaction.

        Args:
            found: (processor time over time, resident memory [bytes], a GPU's memory in use
                [bytes]) of each engine, by index.
        """
        with self._writing() as connection:
            connection.executemany(
                'UPDATE engines SET cpu_share = ?, rss_bytes = ?, gpu_bytes = ? WHERE "index" = ?',
                [(*health, index) for index, health in found.items()],
            )

    def event(
        self,
        text: str,
        *,
        kind: str,
        level: Level = "info",
        job: int | None = None,
        engine: int | None = None,
    ) -> int:
        """Writes down what happened; the newest 20,000 events are kept. Returns its number."""
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO events (time, level, kind, text, job, engine) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (time.time(), level, kind, text, job, engine),
            )
            number = _number(cursor.lastrowid)
            connection.execute("DELETE FROM events WHERE id <= ?", (number - EVENTS_KEPT,))
        return number

    def events(
        self, *, after: int = 0, job: int | None = None, limit: int = 1000
    ) -> tuple[EventRecord, ...]:
        """Returns the newest events after this number, oldest first; of one job, or all."""
        rows = self._rows(
            "SELECT * FROM events WHERE id > ? AND (? IS NULL OR job = ?) ORDER BY id DESC LIMIT ?",
            (after, job, job, limit),
        )
        return tuple(EventRecord(**dict(row)) for row in reversed(rows))

    def command(self, kind: str, job: int | None = None, **payload: Any) -> int:
        """Asks for something; returns the command's number. The last 20,000 are kept.

        Args:
            kind: what is asked; see `CommandRecord`.
            payload: the further arguments, plain values, as JSON at most 64 KiB.
        """
        text = json.dumps(payload)
        _require_small(len(text.encode()), f"a command {kind!r}")
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO commands (kind, job, payload, at, error) VALUES (?, ?, ?, ?, '')",
                (kind, job, text, time.time()),
            )
            number = _number(cursor.lastrowid)
            connection.execute(
                "DELETE FROM commands WHERE id <= ? AND done_at IS NOT NULL",
                (number - COMMANDS_KEPT,),
            )
        return number

    def commands(self) -> tuple[CommandRecord, ...]:
        """Returns the commands that wait to be carried out, in their order."""
        rows = self._rows("SELECT * FROM commands WHERE done_at IS NULL ORDER BY id")
        return tuple(_command(row) for row in rows)

    def command_of(self, number: int) -> CommandRecord:
        """Returns one command, done or not.

        Raises:
            StoreError: there is no command of this number.
        """
        for row in self._rows("SELECT * FROM commands WHERE id = ?", (number,)):
            return _command(row)
        raise StoreError(self._text(f"holds no command {number}"))

    def answer_command(self, number: int, error: str = "") -> None:
        """Says that a command was carried out, or why it was refused."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE commands SET done_at = ?, error = ? WHERE id = ?",
                (time.time(), error, number),
            )

    def count_message(
        self, direction: MessageDirection, num_bytes: int, job: int | None = None, messages: int = 1
    ) -> None:
        """Counts control messages to or from engines; to be called before one is sent.

        Args:
            direction: the direction: "sent" or "received".
            num_bytes: the size of all messages together, in bytes.
            job: the number of the job that they are about; None: of none.
            messages: the number of messages, where several are written down at once.

        Raises:
            ControlMessageTooLarge: a message has more than 64 KiB; it is not counted.
        """
        if direction not in ("sent", "received"):
            raise ValueError(f"messages are 'sent' or 'received', got {direction!r}")
        if num_bytes > messages * LARGEST_MESSAGE_BYTES:
            _require_small(num_bytes, f"a message of job {job}" if job else "a message")
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO ledger (job, direction, messages, bytes) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET "
                "messages = messages + excluded.messages, bytes = bytes + excluded.bytes",
                (job or 0, direction, messages, num_bytes),
            )

    def ledger(self, job: int | None = None) -> dict[MessageDirection, Tally]:
        """Messages that were sent and received so far: of one job, or all."""
        rows = self._rows(
            "SELECT direction, SUM(messages) AS messages, SUM(bytes) AS bytes FROM ledger "
            "WHERE ? IS NULL OR job = ? GROUP BY direction",
            (job, job),
        )
        found = {row["direction"]: Tally(row["messages"], row["bytes"]) for row in rows}
        return {"sent": found.get("sent", Tally()), "received": found.get("received", Tally())}

    def attach(self, owner: ProcessIdentity) -> None:
        """Has the cluster last at least as long as this process, or until it is detached."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO owners (boot, pid, started) VALUES (?, ?, ?)",
                (owner.boot, owner.pid, owner.started),
            )

    def detach(self, owner: ProcessIdentity) -> None:
        """Ends what `attach` began, for a process that may be gone."""
        with self._writing() as connection:
            connection.execute(
                "DELETE FROM owners WHERE boot = ? AND pid = ? AND started = ?",
                (owner.boot, owner.pid, owner.started),
            )

    def owners(self) -> tuple[ProcessIdentity, ...]:
        """Processes that are attached; some may have ended without a word."""
        rows = self._rows("SELECT pid, started, boot FROM owners")
        return tuple(ProcessIdentity(**dict(row)) for row in rows)

    def meta(self, key: str) -> str | None:
        """Returns a note; None where there is none under this key."""
        for (value,) in self._rows("SELECT value FROM meta WHERE key = ?", (key,)):
            return str(value)
        return None

    def set_meta(self, key: str, value: str | None) -> None:
        """Leaves a note in place of another; None removes it."""
        with self._writing() as connection:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
            if value is not None:
                connection.execute("INSERT INTO meta VALUES (?, ?)", (key, value))


def _forget(connection: sqlite3.Connection, last: int) -> None:
    """Removes jobs up to a number that have ended; their messages count among those of no job."""
    query = f"SELECT id FROM jobs WHERE id <= ? AND state IN ({marks(ENDED)})"
    for job in connection.execute(query, (last, *ENDED)).fetchall():
        connection.execute(
            "INSERT INTO ledger SELECT 0, direction, messages, bytes FROM ledger WHERE job = ? "
            "ON CONFLICT DO UPDATE SET "
            "messages = messages + excluded.messages, bytes = bytes + excluded.bytes",
            job,
        )
        connection.execute("DELETE FROM ledger WHERE job = ?", job)
        connection.execute("DELETE FROM packed WHERE job = ?", job)
        connection.execute("DELETE FROM jobs WHERE id = ?", job)


def _ran(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    """Returns the fields of a job that change where it loses the engines that it holds, if any."""
    query = "SELECT began_at, ran_s FROM jobs WHERE id = ?"
    for began_at, ran_s in connection.execute(query, (number,)).fetchall():
        if began_at is not None:  # the clock may have been set back meanwhile
            return {"began_at": None, "ran_s": ran_s + max(0.0, time.time() - began_at)}
    return {}


def _set(
    connection: sqlite3.Connection,
    number: int,
    only_in: Collection[JobState] | None,
    fields: Mapping[str, Any],
) -> bool:
    require_known(fields, set(JOB_COLUMNS) - {"id"}, "a job")
    require_state(fields, JobState)
    states = tuple(get_args(JobState) if only_in is None else only_in)
    assigned = ", ".join(f"{name} = ?" for name in fields)
    cursor = connection.execute(
        f"UPDATE jobs SET {assigned} WHERE id = ? AND state IN ({marks(states)})",
        (*encoded(fields).values(), number, *states),
    )
    return cursor.rowcount == 1


def _are_free(
    connection: sqlite3.Connection, job: int, lease: int | None, places: Collection[int]
) -> bool:
    """Returns whether a job may have these engines: idle, its own, or its lease's and unused."""
    query = f'SELECT state, job FROM engines WHERE "index" IN ({marks(places)})'
    found = [tuple(row) for row in connection.execute(query, tuple(places))]
    if lease is None:
        allowed = {("idle", None), ("busy", job)}
    else:
        allowed = {("busy", lease)}
    if len(found) != len(places) or not allowed.issuperset(found):
        return False
    query = f"SELECT held FROM jobs WHERE lease = ? AND id != ? AND state IN ({marks(ACTIVE)})"
    others = connection.execute(query, (lease, job, *ACTIVE)).fetchall()
    return all(set(places).isdisjoint(json.loads(held)) for (held,) in others)


def _take(connection: sqlite3.Connection, job: int, places: Collection[int]) -> None:
    """Has a job hold these engines and no others."""
    _leave(connection, job)
    connection.executemany(
        "UPDATE engines SET state = 'busy', job = ?, since = ? WHERE \"index\" = ?",
        [(job, time.time(), place) for place in places],
    )


def _leave(connection: sqlite3.Connection, job: int) -> None:
    """Frees what a job holds; an engine that died stays dead."""
    connection.execute(
        "UPDATE engines SET state = CASE state WHEN 'busy' THEN 'idle' ELSE state END, "
        "job = NULL, since = ? WHERE job = ?",
        (time.time(), job),
    )


def _command(row: Any) -> CommandRecord:
    return CommandRecord(**{**dict(row), "payload": json.loads(row["payload"])})


def _number(rowid: int | None) -> int:
    assert rowid is not None  # every insert has one
    return rowid


def _require_small(num_bytes: int, what: str) -> None:
    if num_bytes > LARGEST_MESSAGE_BYTES:
        raise ControlMessageTooLarge(
            f"{what} of {num_bytes:,} bytes: control messages have at most "
            f"{LARGEST_MESSAGE_BYTES:,}"
        )
