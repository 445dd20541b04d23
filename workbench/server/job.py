"""One job that holds engines: its record, its ranks, how it goes; and what is left of its end."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from workbench.server.attempt import Attempt, attempt_folder
from workbench.server.outcome import End, JobOutcome
from workbench.server.pace import MemoryTrend, Pace
from workbench.store.messages import TrainingOutcome
from workbench.store.record import ENDED, JobRecord, JobState
from workbench.store.run_folder import JobTimes, Newest, RunOutcome
from workbench.store.store import Store

QUEUED: frozenset[JobState] = frozenset(("queued",))
STARTING: frozenset[JobState] = frozenset(("starting",))


@dataclass
class Work:
    """A job in one of the states of `jobs.record.ACTIVE`.

    Attributes:
        record: the job, as the store has it.
        waits_since: the time since which it waits for its engines, by a monotonic clock.
        attempt: its ranks; None while engines are waited for.
        newest: the checkpoint that the next attempt goes on from, as it is being looked for.
        ails_since: since when nothing can be done for it, by a monotonic clock; None: all is well.
    """

    record: JobRecord
    waits_since: float
    attempt: Attempt | None = None
    resumed: int = 0
    pace: Pace = field(default_factory=Pace)
    memory: MemoryTrend = field(default_factory=MemoryTrend)
    moved_at: float = 0.0
    written_step: int = 0
    newest: "Future[Newest] | None" = None
    ails_since: float | None = None

    @classmethod
    def of(cls, record: JobRecord, now: float) -> "Work":
        """A job that holds engines, whoever gave them to it: a server that is gone, perhaps."""
        return cls(record, now, written_step=record.step)

    @property
    def is_over(self) -> bool:
        """Whether the attempt that the record speaks of has ended, and the next not begun."""
        attempts = self.record.attempts
        return bool(attempts) and attempts[-1].number == self.record.attempt

    @property
    def step(self) -> int:
        """Updates that are done, as far as is known."""
        return max(self.pace.step, self.resumed)

    def take_up(self, now: float) -> None:
        """Takes up the attempt that another server has begun, if there is one.

        Raises:
            OSError: its folder cannot be read, or made.
        """
        if self.attempt is None and self.record.processes and not self.is_over:
            self.begin(self.record, now)

    def begin(self, record: JobRecord, now: float) -> None:
        """Takes up an attempt whose engines are known."""
        self.record = record
        self.attempt = Attempt(
            record.id,
            record.attempt,
            attempt_folder(record.directory, record.attempt),
            record.held,
            record.processes,
        )
        per_step = record.seconds / record.steps if record.seconds and record.steps else None
        self.pace, self.moved_at = Pace(per_step), now
        self.memory = MemoryTrend()
        self.resumed = step_of(record.checkpoint)
        self.newest = None


def step_of(checkpoint: str | None) -> int:
    """Updates that were done before a checkpoint; 0 without one."""
    return int(Path(checkpoint).name.removeprefix("step-")) if checkpoint else 0


def note_end(store: Store, job: JobRecord, verdict: JobOutcome, ends: Sequence[End] = ()) -> None:
    """Writes how a run ends; to be called before the store says so.

    A server that is killed between the two comes to the same again. Of a job that trains nothing,
    or that goes on, nothing is written.

    Args:
        store: the cluster's store, which is told where the folder cannot be written to.
        job: the job, with all that is known of it by now.
    """
    if job.kind != "train" or verdict.state not in ENDED:
        return
    answers = [end.answer for end in ends if end.answer is not None]
    values = [answer.value for answer in answers]
    reported = tuple(value for value in values if isinstance(value, TrainingOutcome))
    outcome = RunOutcome(
        job=job.id,
        state=verdict.state,
        reason=verdict.reason,
        step=job.step,
        attempts=job.attempts,
        error=verdict.error,
        ranks=reported if len(reported) == len(ends) else (),
        has_lost_rows=any(answer.lost_rows for answer in answers),
    )
    times = JobTimes(job.submitted_at, job.started_at, time.time())
    try:
        outcome.save(Path(job.directory), times)
    except OSError as error:
        text = f"how {job.name} ended could not be written into its folder: {error}"
        store.event(text, kind="record", level="warning", job=job.id)


def note_beginning(job: JobRecord) -> None:
    """Takes back how a run ended: it goes on."""
    if job.kind == "train":
        RunOutcome.forget(Path(job.directory))
