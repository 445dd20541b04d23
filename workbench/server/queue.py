"""Jobs that wait: which of them gets which engines, as the scheduler decides."""

import signal
from collections.abc import Sequence
from pathlib import Path

from workbench.scheduler.scheduling import Decisions, schedule
from workbench.server.commands import Commands
from workbench.server.fleet import Fleet
from workbench.server.job import QUEUED
from workbench.store.rank_files import RankFiles, withdraw
from workbench.store.record import ACTIVE, JobRecord
from workbench.store.store import Store

UNFINISHED = QUEUED | ACTIVE


class Queue:
    """Starts what waits, and has what runs make room."""

    def __init__(self, store: Store, fleet: Fleet, commands: Commands) -> None:
        self._store, self._fleet, self._commands = store, fleet, commands

    def settle(self, now: float) -> bool:
        """Gives free engines to jobs that wait; whether one began.

        Args:
            now: seconds since the epoch.
        """
        jobs = self._store.jobs(states=UNFINISHED)
        self._let_go(jobs)
        by_id = {job.id: job for job in jobs}
        if not any(job.state == "queued" for job in jobs):
            return False
        decided = schedule(jobs, self._fleet.for_scheduling(), now)
        began = [job for job, places in decided.starts if self._begin(by_id[job], places)]
        for job in decided.preempt:
            self._preempt(by_id[job], decided.reasons.get(job, ""))
        self._explain([j for j in jobs if j.state == "queued" and j.id not in began], decided)
        return bool(began)

    def _preempt(self, job: JobRecord, why: str) -> None:
        """Has a job leave a checkpoint, and its engines."""
        if self._commands.request(job, "preempt"):
            self._store.event(f"{job.name} preempts: {why}", kind="preempt", job=job.id)

    def _explain(self, waiting: Sequence[JobRecord], decided: Decisions) -> None:
        """Writes down why jobs wait, where that is news."""
        reasons = {job.id: decided.reasons.get(job.id, "") for job in waiting}
        news = {
            job.id: {"reason": reasons[job.id]} for job in waiting if reasons[job.id] != job.reason
        }
        if news:
            self._store.update_all(news, only_in=QUEUED)

    def _let_go(self, jobs: Sequence[JobRecord]) -> None:
        """Cancels what somebody waits for who is gone, and calls whose lease is over.

        Calls fail whose engines are gone: whoever waits for them is told.
        """
        for job in jobs:
            reason = ""
            if job.kind != "train" and job.owner is not None and not job.owner.is_alive:
                reason = f"process {job.owner.pid}, which waited for it, has ended"
            elif job.lease is not None and self._store.job(job.lease).has_ended:
                reason = f"the engines of lease {job.lease} were given back before"
            if reason and not self._store.release(
                job.id, "cancelled", only_in=QUEUED, reason=reason
            ):
                self._commands.request(job, "cancel")
            lost = self._fleet.loss(job) if job.kind == "call" and not reason else None
            if lost is not None:
                self._store.release(job.id, "failed", only_in=QUEUED, reason=lost.text, error=lost)

    def _begin(self, job: JobRecord, places: tuple[int, ...]) -> bool:
        """Takes engines for a job's next attempt; one whose folder fails is parked."""
        try:
            if job.directory:
                job = self._after_known_attempts(job)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            self._store.release(job.id, "parked", only_in=QUEUED, reason=text)
            self._store.event(f"{job.name} parked: {text}", kind="parked", job=job.id)
            return False
        return self._store.claim(job.id, job.attempt, places)

    def _after_known_attempts(self, job: JobRecord) -> JobRecord:
        """Ends attempts that the store knows nothing of, as an older one is in its place."""
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
        engines = {engine.pid: engine.process for engine in self._fleet.living()}
        for path in attempt.glob("rank-*.alive"):
            files = RankFiles(attempt, int(path.stem.removeprefix("rank-")))
            if files.answer is None and (process := engines.get(files.pid)) is not None:
                process.send(signal.SIGKILL)
