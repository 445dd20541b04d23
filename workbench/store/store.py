"""The state of a cluster: jobs, engines, and all else that outlives every one of its processes."""

import sqlite3
import time
from collections.abc import Collection, Mapping
from typing import Any, get_args

from workbench.store.backup import Backups
from workbench.store.database import (
    JOB_COLUMNS,
    encoded,
    job_of,
    marks,
    require_known,
    require_state,
)
from workbench.store.errors import StoreError
from workbench.store.history import History
from workbench.store.journal import Journal
from workbench.store.record import ENDED, JobRecord, Request, State
from workbench.store.roster import Roster, are_free, leave, take

QUEUED: tuple[State, ...] = ("queued",)


class Store(Roster, Journal, History, Backups):
    """Jobs and engines in one SQLite file, used by notebooks, the job server and the supervisor.

    Every method is one short transaction; all may be called from any thread of any process.
    `roster`, `journal`, `history`, `restoring` and `database` say the others, and what is raised.
    """

    def submit(self, request: Request) -> int:
        """Queues a job; returns its number."""
        names = [name for name in JOB_COLUMNS if name in Request.__dataclass_fields__]
        values = encoded({name: getattr(request, name) for name in names})
        values |= {"state": "queued", "attempt": 0, "held": "[]", "pids": "[]", "attempts": "[]"}
        values |= {"submitted_at": time.time(), "step": 0, "reason": "", "wish": "", "ran_s": 0.0}
        packed = {"packed": request.packed, "keywords": request.keywords}
        packed |= {str(ranks): each for ranks, each in request.variants.items()}
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
        return cursor.lastrowid

    def job(self, number: int) -> JobRecord:
        """One job, whole.

        Raises:
            StoreError: there is none of this number.
        """
        for row in self._rows("SELECT * FROM jobs WHERE id = ?", (number,)):
            packed = self._rows("SELECT what, bytes FROM packed WHERE job = ?", (number,))
            return job_of(row, {what: each for what, each in packed})
        raise StoreError(self._text(f"holds no job {number}"))

    def jobs(
        self,
        *,
        states: Collection[State] | None = None,
        tag: str | None = None,
        after: int = 0,
    ) -> tuple[JobRecord, ...]:
        """Jobs in the order in which they were submitted.

        `packed`, `keywords` and the values of `variants` are empty: `job` has them.

        Args:
            states: only jobs in these.
            tag: only those of this sweep.
            after: only those with a greater number.
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
        self, number: int, *, only_in: Collection[State] | None = None, **fields: Any
    ) -> bool:
        """Changes fields of a job, unless it is in another state than `only_in`.

        Returns:
            Whether it was changed.

        Raises:
            ValueError: an unknown field or state.
        """
        return self.update_all({number: fields}, only_in=only_in) == 1

    def update_all(
        self,
        changes: Mapping[int, Mapping[str, Any]],
        *,
        only_in: Collection[State] | None = None,
    ) -> int:
        """As `update`, for several jobs in one transaction; returns how many were changed."""
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
        only_in: Collection[State] = QUEUED,
        **fields: Any,
    ) -> bool:
        """Begins the attempt that follows `attempt`, on engines that are taken with it.

        However many servers try, one succeeds: an attempt starts at most once.

        Args:
            number: the job's.
            attempt: the one that it had last, as the caller knows it.
            places: the engine of each rank: each idle, held by this job from an earlier attempt,
                or by the lease that it runs under.
            only_in: states in which it may begin.
            fields: others that change with it.

        Returns:
            Whether the caller may start it now; False where somebody else was first, or an
            engine is not free any more.
        """
        with self._writing() as connection:
            query = "SELECT attempt, lease, started_at FROM jobs WHERE id = ?"
            found = connection.execute(query, (number,)).fetchone()
            if found is None or found["attempt"] != attempt:
                return False
            if not are_free(connection, number, found["lease"], places):
                return False
            now = time.time()
            began: dict[str, Any] = {"attempt": attempt + 1, "began_at": now}
            began |= {
                "state": "starting",
                "held": tuple(places),
                "pids": (),
                "predicted_start": None,
            }
            began["started_at"] = now if found["started_at"] is None else found["started_at"]
            if not _set(connection, number, only_in, _ran(connection, number) | began | fields):
                return False
            if found["lease"] is None:
                take(connection, number, places)
        return True

    def release(
        self, number: int, state: State, *, only_in: Collection[State] | None = None, **fields: Any
    ) -> bool:
        """Takes a job's engines from it, which are idle then, and gives it another state.

        Args:
            number: the job's.
            state: what it is from then on: ended, "queued" again or "paused".
            only_in: nothing happens in any other state.
            fields: others that change with it.

        Returns:
            Whether it was changed.
        """
        ended_at = time.time() if state in ENDED else None
        left = {"state": state, "held": (), "pids": (), "ended_at": ended_at}
        with self._writing() as connection:
            if not _set(connection, number, only_in, left | _ran(connection, number) | fields):
                return False
            leave(connection, number)
        return True


def _ran(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    """What a job is to be changed by where it loses the engines that it holds, if any."""
    query = "SELECT began_at, ran_s FROM jobs WHERE id = ?"
    for began_at, ran_s in connection.execute(query, (number,)).fetchall():
        if began_at is not None:  # the clock may have been set back meanwhile
            return {"began_at": None, "ran_s": ran_s + max(0.0, time.time() - began_at)}
    return {}


def _set(
    connection: sqlite3.Connection,
    number: int,
    only_in: Collection[State] | None,
    fields: Mapping[str, Any],
) -> bool:
    require_known(fields, set(JOB_COLUMNS) - {"id"}, "a job")
    require_state(fields, State)
    states = tuple(get_args(State) if only_in is None else only_in)
    assigned = ", ".join(f"{name} = ?" for name in fields)
    cursor = connection.execute(
        f"UPDATE jobs SET {assigned} WHERE id = ? AND state IN ({marks(states)})",
        (*encoded(fields).values(), number, *states),
    )
    return cursor.rowcount == 1
