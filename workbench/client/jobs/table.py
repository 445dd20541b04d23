"""Jobs as lines of a table."""

import time
from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import Any

from workbench.store.record import JobRecord

HEAD = ("job", "name", "state", "engines", "steps", "")


def columns_of(job: JobRecord) -> dict[str, Any]:
    """What is said of a job, by column; times are of this host's zone."""
    return {
        "job": job.id,
        "name": job.name,
        "state": job.state,
        "engines": list(job.held) or job.engines,
        "priority": job.priority,
        "step": job.step,
        "steps": job.steps,
        "attempts": job.attempt,
        "submitted": _clock(job.submitted_at),
        "started": _clock(job.started_at),
        "ended": _clock(job.ended_at),
        "predicted_start": _clock(job.predicted_start),
        "predicted_seconds": job.seconds,
        "predicted_bytes": job.memory_bytes,
        "sweep": job.tag,
        "reason": job.reason,
        "directory": job.directory,
    }


def lines(jobs: Iterable[JobRecord]) -> str:
    """As text, with a heading."""
    told = [HEAD, *map(_told, jobs)]
    widths = [max(len(line[column]) for line in told) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in told
    )


def html(jobs: Iterable[JobRecord]) -> str:
    """As a table that reads well without a kernel, in inline styles."""
    style = "style='text-align:left'"
    head = "".join(f"<th {style} scope='col'>{name}</th>" for name in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(cell)}</td>" for cell in _told(job)) + "</tr>"
        for job in jobs
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _told(job: JobRecord) -> tuple[str, ...]:
    engines = ", ".join(map(str, job.held)) if job.held else f"{job.engines} wanted"
    why = job.reason.partition("\n")[0]
    if job.predicted_start is not None:
        wait_s = max(0.0, job.predicted_start - time.time())
        why = f"{why}; starts in about {wait_s:.0f} s" if why else f"starts in about {wait_s:.0f} s"
    return (str(job.id), job.name, job.state, engines, f"{job.step} of {job.steps}", why)


def _clock(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds)
