"""What the store holds besides jobs and engines: events, commands, messages, owners, notes."""

import json
import time
from typing import Any

from workbench.store.database import Database
from workbench.store.errors import ControlMessageTooLarge, StoreError
from workbench.store.record import (
    LARGEST_MESSAGE_BYTES,
    Command,
    Direction,
    Event,
    Level,
    Owner,
    Tally,
)

EVENTS_KEPT = 20_000


class Journal(Database):
    """What happened, and what is asked for, as rows of the store."""

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
    ) -> tuple[Event, ...]:
        """The newest events, oldest first: those with a greater number than `after`, of one job."""
        rows = self._rows(
            "SELECT * FROM events WHERE id > ?1 AND (?2 IS NULL OR job = ?2) "
            "ORDER BY id DESC LIMIT ?3",
            (after, job, limit),
        )
        return tuple(Event(**dict(row)) for row in reversed(rows))

    def command(self, kind: str, job: int | None = None, **payload: Any) -> int:
        """Asks for something; returns the command's number.

        Args:
            kind: see `Command`.
            job: what it is about.
            payload: plain values, as JSON at most 64 KiB.
        """
        text = json.dumps(payload)
        _require_small(len(text.encode()), f"a command {kind!r}")
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO commands (kind, job, payload, at, error) VALUES (?, ?, ?, ?, '')",
                (kind, job, text, time.time()),
            )
        return _number(cursor.lastrowid)

    def commands(self) -> tuple[Command, ...]:
        """Those that wait to be carried out, in the order in which they were given."""
        rows = self._rows("SELECT * FROM commands WHERE done_at IS NULL ORDER BY id")
        return tuple(_command(row) for row in rows)

    def command_of(self, number: int) -> Command:
        """One command, done or not.

        Raises:
            StoreError: there is none of this number.
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
        self, direction: Direction, num_bytes: int, job: int | None = None, messages: int = 1
    ) -> None:
        """Counts control messages to or from engines; to be called before one is sent.

        Args:
            direction: "sent" or "received".
            num_bytes: of all of them.
            job: what they are about; None: of none.
            messages: how many, where several are written down at once.

        Raises:
            ControlMessageTooLarge: one has more than 64 KiB; it is not counted.
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

    def ledger(self, job: int | None = None) -> dict[Direction, Tally]:
        """Messages that were sent and received so far: of one job, or all."""
        rows = self._rows(
            "SELECT direction, SUM(messages) AS messages, SUM(bytes) AS bytes FROM ledger "
            "WHERE ?1 IS NULL OR job = ?1 GROUP BY direction",
            (job,),
        )
        found = {row["direction"]: Tally(row["messages"], row["bytes"]) for row in rows}
        return {"sent": found.get("sent", Tally()), "received": found.get("received", Tally())}

    def attach(self, owner: Owner) -> None:
        """Has the cluster last at least as long as this process, or until it is detached."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO owners (host, pid, started) VALUES (?, ?, ?)",
                (owner.host, owner.pid, owner.started),
            )

    def detach(self, owner: Owner) -> None:
        """The opposite of `attach`; also for one that is gone."""
        with self._writing() as connection:
            connection.execute(
                "DELETE FROM owners WHERE host = ? AND pid = ? AND started = ?",
                (owner.host, owner.pid, owner.started),
            )

    def owners(self) -> tuple[Owner, ...]:
        """Processes that are attached; some may have ended without a word."""
        rows = self._rows("SELECT pid, started, host FROM owners")
        return tuple(Owner(**dict(row)) for row in rows)

    def meta(self, key: str) -> str | None:
        """A note; None where there is none under this key."""
        for (value,) in self._rows("SELECT value FROM meta WHERE key = ?", (key,)):
            return str(value)
        return None

    def set_meta(self, key: str, value: str | None) -> None:
        """Leaves a note in place of another; None removes it."""
        with self._writing() as connection:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
            if value is not None:
                connection.execute("INSERT INTO meta VALUES (?, ?)", (key, value))


def _command(row: Any) -> Command:
    return Command(**{**dict(row), "payload": json.loads(row["payload"])})


def _number(rowid: int | None) -> int:
    assert rowid is not None  # every insert has one
    return rowid


def _require_small(num_bytes: int, what: str) -> None:
    if num_bytes > LARGEST_MESSAGE_BYTES:
        raise ControlMessageTooLarge(
            f"{what} of {num_bytes:,} bytes: control messages have at most "
            f"{LARGEST_MESSAGE_BYTES:,}"
        )
