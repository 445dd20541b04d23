"""When jobs that wait are likely to start."""

from collections.abc import Sequence

import numpy as np

from workbench.cluster.jobs.backfill import End, Waiting, indices_of


def forecast(
    queue: Sequence[Waiting], free: int, ends: Sequence[End], now: float
) -> dict[int, float]:
    """The time at which each job starts, if each takes the engines that are free first.

    Gaps are not used, so a job may start earlier. Nothing is said of jobs that wait for engines
    which are missing, or for others of unknown length.

    Args:
        queue: jobs, the first to be served first.
        free: engines in no use.
        ends: engines in use; at an infinite time, where nobody knows.
        now: the time.
    """
    everything = free
    for engines in (*(end.engines for end in ends), *(job.eligible for job in queue)):
        everything |= engines
    available = np.full(everything.bit_length(), np.inf)
    available[list(indices_of(free))] = now
    for end in ends:
        available[list(indices_of(end.engines))] = max(end.time, now)
    columns: dict[int, np.ndarray] = {}
    starts = {}
    for job in queue:
        if job.eligible not in columns:
            columns[job.eligible] = np.array(indices_of(job.eligible), dtype=np.intp)
        own = columns[job.eligible]
        if len(own) < job.need:
            continue
        first = own[np.argpartition(available[own], job.need - 1)[: job.need]]
        start = float(available[first].max())
        if np.isfinite(start):
            starts[job.id] = start
            available[first] = start + job.seconds
    return starts
