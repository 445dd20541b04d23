"""Jobs that wait: which of them gets which engines, as the scheduler decides."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from workbench.cluster.jobs.record import ACTIVE, JobRecord
from workbench.cluster.jobs.store import Store
from workbench.cluster.rank_files import RankFiles, withdraw
from workbench.cluster.server.commands import Commands
from workbench.cluster.server.fleet import Fleet
from workbench.cluster.server.work import QUEUED


class Queue:
    """Starts what waits, and has what runs make room.

    Args:
        store: of the cluster.
        fleet: its engines.
        commands: takes wishes for jobs that run.
    """

    def __init__(self, store: Store, fleet: Fleet, commands: Commands) -> None:
        self._store, self._fleet, self._commands = store, fleet, commands

    def settle(self) -> bool:
        """Gives free engines to jobs that wait; whether one began."""
        self._let_go()
        queued = self._store.jobs(states=QUEUED)
        under = [job for job in queued if job.lease is not None]
        began = [job for job in under if self._begin_under_lease(job)]
        waiting = [job for job in queued if job.lease is None]
        if waiting:
            began += self._schedule(waiting)
        return bool(began)

    def _let_go(self) -> None:
        """Cancels what somebody waits for who is gone."""
        for job in self._store.jobs(states=QUEUED | ACTIVE):
            if job.kind == "train" or job.owner is None or job.owner.is_alive:
                continue
            reason = f"process {job.owner.pid}, which waited for it, has ended"
            if not self._store.release(job.id, "cancelled", only_in=QUEUED, reason=reason):
                self._commands.wish(job, "cancel")

    def _begin_under_lease(self, job: JobRecord) -> bool:
        assert job.lease is not None
        lease = self._store.job(job.lease)
        if lease.has_ended:
            reason = f"its engines were given back before: {lease.reason}"
            self._store.release(job.id, "cancelled", only_in=QUEUED, reason=reason)
            return False
        places = job.places or lease.held[: job.engines]
        if not lease.held or not set(places) <= set(lease.held):
            return False
        return self._begin(job, places)

    def _schedule(self, waiting: list[JobRecord]) -> list[JobRecord]:
        began = []
        free = [e.index for e in self._fleet.usable() if e.state == "idle" and not e.is_assistant]
        idle = {e.index for e in self._fleet.usable() if e.state == "idle"}
        for job in sorted(waiting, key=lambda job: (-job.priority, job.id)):
            places = job.places or tuple(free[: job.engines])
            if len(places) == job.engines and set(places) <= idle and self._begin(job, places):
                free = [index for index in free if index not in places]
                idle -= set(places)
                began.append(job)
        return began

    def _begin(self, job: JobRecord, places: tuple[int, ...]) -> bool:
        """Takes engines for a job's next attempt."""
        if job.directory:
            job = self._after_known_attempts(job)
        return self._store.claim(job.id, job.attempt, places)

    def _after_known_attempts(self, job: JobRecord) -> JobRecord:
        """Ends attempts that the store knows nothing of, as it was restored from a backup."""
        folder = Path(job.directory) / "attempts"
        numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
        unknown = [number for number in numbers if number > job.attempt]
        for number in unknown:
            withdraw(folder / str(number))
            self._end_ranks(folder / str(number))
        if unknown:
            self._store.update(job.id, only_in=QUEUED, attempt=max(unknown))
            job = self._store.job(job.id)
        return job

    def _end_ranks(self, attempt: Path) -> None:
        engines = {engine.pid for engine in self._fleet.usable()}
        for path in attempt.glob("rank-*.alive"):
            files = RankFiles(attempt, int(path.stem.removeprefix("rank-")))
            if files.answer is None and (pid := files.pid) in engines and pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
