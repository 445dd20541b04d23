"""Jobs as a person sees them: in which order, what may be asked of them, and when they end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from workbench.scheduler.order import order
from workbench.scheduler.requirements import length
from workbench.store.record import ACTIVE, ENDED, JobRecord

ACTIONS = ("pause", "resume", "stop", "cancel", "up", "down")
_LIVELY = {"running": 0, "stopping": 0, "starting": 0, "queued": 1, "paused": 2}


@dataclass(frozen=True)
class Page:
    """Some of the jobs.

    Attributes:
        jobs: those that are shown.
        number: of the page, from 1 on.
        pages: how many there are.
        found: jobs that fit the filter.
        total: all jobs.
    """

    jobs: tuple[JobRecord, ...]
    number: int
    pages: int
    found: int
    total: int


def page_of(
    jobs: Sequence[JobRecord], words: str, number: int, size: int, now: float | None = None
) -> Page:
    """The jobs of one page: those that run, wait and are paused, then those that have ended.

    What waits is in the order in which the server would start it; what has ended, newest first.

    Args:
        jobs: all of them.
        words: only jobs that have each of these in their number, name, state, sweep or reason.
        number: of the page; beyond the last one, that one.
        size: jobs on a page.
        now: seconds since the epoch; None: now.
    """
    at = time.time() if now is None else now
    wanted = words.lower().split()
    found = [job for job in jobs if all(word in _text(job) for word in wanted)]

    def place(job: JobRecord) -> tuple[float, ...]:
        if job.state in ENDED:
            return (3, -(job.ended_at or 0.0), -job.id)
        return (_LIVELY[job.state], *order(job, at))

    found.sort(key=place)
    pages = max(1, -(-len(found) // size))
    number = min(max(number, 1), pages)
    shown = tuple(found[(number - 1) * size : number * size])
    return Page(shown, number, pages, len(found), len(jobs))


def counts(jobs: Sequence[JobRecord]) -> dict[str, int]:
    """How many jobs are in each state, in the order in which states first occur."""
    found: dict[str, int] = {}
    for job in jobs:
        found[job.state] = found.get(job.state, 0) + 1
    return found


def row(job: JobRecord, now: float) -> dict[str, Any]:
    """What a view shows of a job.

    Args:
        job: as it is.
        now: seconds since the epoch, when it was so.
    """
    what, at = foreseen(job, now)
    text = job.reason if job.error is None else f"{job.error.kind}: {job.error.text}"
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "engines": _engines(job),
        "priority": job.priority,
        "step": job.step,
        "steps": job.steps,
        "when": what,
        "at": None if at is None else round(at),
        "reason": text,
        "tag": job.tag,
        "can": {action: why_not(job, action) for action in ACTIONS},
    }


def foreseen(job: JobRecord, now: float) -> tuple[str, float | None]:
    """What comes next of a job, or came last, and when, in seconds since the epoch.

    The end of one that runs is foreseen from its own pace, and else from its predicted length;
    that of one that waits from its predicted start.
    """
    if job.state in ENDED:
        return "ended", job.ended_at
    if job.state == "paused":
        return "", None
    if job.state in ACTIVE:
        left = _left(job, now)
        return ("ends", now + left) if isfinite(left) else ("", None)
    if job.predicted_start is None:
        return "", None
    whole = length(job, job.engines, now)
    if isfinite(whole):
        return "ends", max(job.predicted_start, now) + whole
    return "starts", job.predicted_start


def why_not(job: JobRecord, action: str) -> str:
    """Why something cannot be asked of a job; "": it can."""
    if action == "resume":
        if job.state == "finished":
            return "all of its steps are done"
        return "" if job.state == "paused" or job.state in ENDED else f"it is {job.state}"
    if job.state in ENDED:
        return f"it has ended: {job.state}"
    if action == "pause" and job.state == "paused":
        return "it is paused"
    if job.state == "stopping" and action in ("pause", "stop"):
        return "it is stopping"
    return ""


def _engines(job: JobRecord) -> str:
    if job.held:
        return f"on {', '.join(map(str, job.held))}"
    return str(job.engines) if job.state in ENDED else f"{job.engines} wanted"


def _left(job: JobRecord, now: float) -> float:
    """Seconds until a job that runs ends."""
    begun = job.attempts[-1].step if job.attempts else 0
    if job.began_at is not None and job.step > begun and now > job.began_at:
        return (job.steps - job.step) * (now - job.began_at) / (job.step - begun)
    return length(job, len(job.held) or job.engines, now)


def _text(job: JobRecord) -> str:
    return f"{job.id} {job.name} {job.state} {job.tag} {job.reason}".lower()
