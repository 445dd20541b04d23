"""What the job server leaves in a run's folder: how the run ended, for whoever has no cluster."""

import time
from collections.abc import Sequence
from pathlib import Path

from workbench.server.outcome import End, JobOutcome
from workbench.store.messages import TrainingOutcome
from workbench.store.record import ENDED, JobRecord
from workbench.store.run_folder import JobTimes, RunOutcome
from workbench.store.store import Store


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
