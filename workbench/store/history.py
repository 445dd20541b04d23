"""A run's metrics, kept for as long as it is: its last steps all, those before thinned out.

A rank keeps its last 512 rows. Of those before, one in every 2^k steps is kept, with the least k
that leaves at most 512 of them. So a week of steps takes as much room as an hour of them.

    steps   0 . . . 8 . . . 16 . . . 24 . . . (every 8th) . . . | 4,000 4,001 4,002 ... (all)
"""

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Sequence

from workbench.plan.metrics import Row
from workbench.store.database import Database
from workbench.store.rows import ROW_BYTES, unpack

RECENT = 512  # rows of each rank that are all kept
_PERIOD = RECENT // 2  # steps from one thinning to the next
_NAMED = struct.Struct("=2d")  # what a row begins with: its step and rank


class History(Database):
    """The metrics of runs, as rows of the store."""

    def add_rows(self, job: int, packed: bytes) -> None:
        """Takes rows of a job, of any ranks: of each step, what comes last stays.

        Args:
            job: its number.
            packed: whole rows, as `rows.pack` makes them.

        Raises:
            ValueError: the last row is not whole.
        """
        if len(packed) % ROW_BYTES:
            raise ValueError(
                f"rows have {ROW_BYTES} bytes each, got {len(packed):,} bytes of job {job}"
            )
        rows, steps = [], defaultdict(list)
        for start in range(0, len(packed), ROW_BYTES):
            step, rank = map(int, _NAMED.unpack_from(packed, start))
            rows.append((job, rank, step, packed[start : start + ROW_BYTES]))
            steps[rank].append(step)
        with self._writing() as connection:
            before = {rank: _newest(connection, job, rank) for rank in steps}
            connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)
            for rank, own in steps.items():
                earliest = min(own[0] - 1, before[rank])
                if max(own) // _PERIOD > earliest // _PERIOD:
                    _thin(connection, job, rank, max(*own, before[rank]))

    def rows(self, job: int, *, after: int = -1, ranks: Sequence[int] = ()) -> list[Row]:
        """Rows of a job that were kept, by step and rank.

        Args:
            job: its number.
            after: only of later steps.
            ranks: only of these; () for all.
        """
        chosen = f"AND rank IN ({', '.join(map(str, map(int, ranks)))})" if ranks else ""
        found = self._rows(
            f"SELECT row FROM metrics WHERE job = ? AND step > ? {chosen} ORDER BY step, rank",
            (job, after),
        )
        return list(unpack(b"".join(packed for (packed,) in found)))


def _newest(connection: sqlite3.Connection, job: int, rank: int) -> int:
    query = "SELECT MAX(step) FROM metrics WHERE job = ? AND rank = ?"
    (step,) = connection.execute(query, (job, rank)).fetchone()
    return -1 if step is None else int(step)


def _thin(connection: sqlite3.Connection, job: int, rank: int, newest: int) -> None:
    """Removes all that is not to be kept, now that there is a row of step `newest`."""
    recent = newest - RECENT
    stride = 1
    while recent // stride > RECENT:
        stride *= 2
    connection.execute(
        "DELETE FROM metrics WHERE job = ? AND rank = ? AND step <= ? AND step % ?",
        (job, rank, recent, stride),
    )
