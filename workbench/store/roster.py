"""Engines, as rows of the store, and which job holds which of them."""

import json
import sqlite3
import time
from collections.abc import Collection, Mapping
from typing import Any

from workbench.store.database import (
    ENGINE_COLUMNS,
    Database,
    engine_of,
    marks,
    require_known,
    require_state,
)
from workbench.store.record import ACTIVE, EngineRecord, EngineState


class Roster(Database):
    """The engines of a cluster, the assistant with them."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """All of them, by index."""
        return tuple(map(engine_of, self._rows('SELECT * FROM engines ORDER BY "index"')))

    def set_engine(self, index: int, **fields: Any) -> None:
        """Changes fields of an engine, or adds it; `since` follows its state by itself.

        Raises:
            ValueError: an unknown field or state.
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
                tuple(values.values()),
            )

    def note_health(self, found: Mapping[int, tuple[float, int, int]]) -> None:
        """Writes down how engines do, of all in one transaction.

        Args:
            found: by index: processor time over time, resident memory, and a GPU's in use, in
                bytes.
        """
        with self._writing() as connection:
            connection.executemany(
                'UPDATE engines SET cpu_share = ?, rss_bytes = ?, gpu_bytes = ? WHERE "index" = ?',
                [(*health, index) for index, health in found.items()],
            )


def are_free(
    connection: sqlite3.Connection, job: int, lease: int | None, places: Collection[int]
) -> bool:
    """Whether a job may have these engines: all idle, or its own, or its lease's and unused."""
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


def take(connection: sqlite3.Connection, job: int, places: Collection[int]) -> None:
    """Has a job hold these engines and no others."""
    leave(connection, job)
    connection.executemany(
        "UPDATE engines SET state = 'busy', job = ?, since = ? WHERE \"index\" = ?",
        [(job, time.time(), place) for place in places],
    )


def leave(connection: sqlite3.Connection, job: int) -> None:
    """Frees what a job holds; an engine that died stays dead."""
    connection.execute(
        "UPDATE engines SET state = CASE state WHEN 'busy' THEN 'idle' ELSE state END, "
        "job = NULL, since = ? WHERE job = ?",
        (time.time(), job),
    )
