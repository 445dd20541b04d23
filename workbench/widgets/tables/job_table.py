"""The jobs of a cluster, live: what runs, what waits, when it ends, and buttons to change that.

Jobs that have ended are read once, so that ten thousand of them cost nothing any more.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.client.jobs import jobs_frame
from workbench.plan.io.html import Markup
from workbench.scheduler.jobs import length, order
from workbench.store.record import ACTIVE, ENDED, JobRecord, JobState
from workbench.store.store import Store
from workbench.widgets.base.widget import View
from workbench.widgets.tables.cluster_table import ClusterTable, brief, table_html

if TYPE_CHECKING:
    import pandas

ACTIONS = ("pause", "resume", "stop", "cancel", "up", "down")
_LIVELY = {"running": 0, "stopping": 0, "starting": 0, "queued": 1, "paused": 2}


@dataclass(frozen=True)
class Page:
    """Some of the jobs."""

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
        jobs: all jobs.
        words: words that a job must have in its number, name, state, sweep or reason.
        number: number of the page; beyond the last one, that one.
        size: number of jobs on a page.
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
    """What a view shows of a job."""
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

    The end of one that runs is foreseen from its own pace, and else from its predicted length.
    """
    if job.state in ENDED:
        return "ended", job.ended_at
    left = _left(job, now) if job.state in ACTIVE else inf
    return ("ends", now + left) if isfinite(left) else ("", None)


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
    return length(job, now)


def _text(job: JobRecord) -> str:
    return f"{job.id} {job.name} {job.state} {job.tag} {job.reason}".lower()


class JobCache:
    """What is known of every job that trains, by number.

    Jobs that have ended stay as they are until they are resumed, and are read once.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[int, JobRecord] = {}
        self._last = 0

    def read(self) -> tuple[JobRecord, ...]:
        """All of them, as they are now, in the order of submission.

        Raises:
            StoreError: the store cannot be read.
        """
        live = {job.id for job in self._known.values() if job.state not in ENDED}
        found = {job.id: job for job in self.store.jobs(after=self._last)}
        found |= {job.id: job for job in self.store.jobs(states=_LIVE)}
        for number in live - found.keys():  # these have ended since
            found[number] = self.store.job(number)
        self._last = max(self._last, *found, 0)
        self._known |= {number: job for number, job in found.items() if job.kind == "train"}
        return tuple(self._known[number] for number in sorted(self._known))


_LIVE: tuple[JobState, ...] = ("queued", "starting", "running", "stopping", "paused")


_DOING = {
    "pause": "is asked to pause …",
    "resume": "is asked to go on …",
    "stop": "is asked to stop …",
    "cancel": "is cancelled …",
    "up": "gets a higher priority …",
    "down": "gets a lower priority …",
}


class JobTable(ClusterTable):
    """All jobs of a cluster, live: state, engines, progress, predicted end, and why they wait.

    Args:
        cluster: the cluster whose jobs are shown.
        state: first values of the attributes.

    Attributes:
        cluster: the cluster; another one may be assigned.
        filter: words that a job must have in its number, name, state, sweep or reason.
        page: the part that is shown, from 1 on.
        page_size: number of jobs on a page, 1 to 200.
        counts: number of jobs in each state; read-only.

    Raises:
        TypeError: no cluster.
    """

    script = "jobtable"

    filter = traitlets.Unicode()
    page = traitlets.Int(1)
    page_size = traitlets.Int(20, min=1, max=200)
    counts = traitlets.Dict(read_only=True)

    def __init__(self, cluster: Any, **state: Any) -> None:
        self._job_cache: JobCache | None = None
        self._jobs: tuple[JobRecord, ...] = ()
        self._read_at = time.time()
        super().__init__(cluster, **state)

    @property
    def jobs(self) -> tuple[JobRecord, ...]:
        """All of them as they were last read, in the order of submission."""
        return self._jobs

    def take(self, store: Store) -> None:
        """Reads the jobs that may have changed."""
        if self._job_cache is None or self._job_cache.store is not store:
            self._job_cache = JobCache(store)
        jobs, now = self._job_cache.read(), time.time()
        with self._guard:
            before = counts(self._jobs)
            self._jobs, self._read_at = jobs, now
            self.set_trait("counts", counts(jobs))
            self.refresh()
            if self.counts != before:
                self.keep_soon()

    def view(self) -> View:
        """One page, with what may be asked of each job on it."""
        page = page_of(self._jobs, self.filter, self.page, self.page_size, self._read_at)
        rows = [
            {**row(job, self._read_at), "told": self._told.get(str(job.id), "")}
            for job in page.jobs
        ]
        return {
            "cluster": self.cluster.name,
            "counts": counts(self._jobs),
            "rows": rows,
            "page": page.number,
            "pages": page.pages,
            "page_size": self.page_size,
            "found": page.found,
            "total": page.total,
            "filter": self.filter,
            "gone": self._gone,
            "error": self._told.get("", ""),
        }

    def act(self, content: Mapping[str, Any]) -> None:
        """Turns pages, filters, or asks something of a job.

        Raises:
            ValueError: the message is of another type.
        """
        self._told.pop("", None)
        match content["type"]:
            case "filter":
                self.page, self.filter = 1, str(content["value"])
            case "page":
                self.page = int(content["value"])
            case "job":
                self.ask_of(int(content["job"]), str(content["action"]))
            case other:
                raise ValueError(f"there is no {other!r} to do")

    def ask_of(self, number: int, action: str) -> None:
        """What a button does: "pause", "resume", "stop", "cancel", priority "up" or "down".

        It returns at once; `settle` waits until the server has answered. What it refuses is shown
        in the job's row.

        Raises:
            ValueError: there is no such action or job, or this cannot be asked of it.
        """
        if action not in ACTIONS:
            raise ValueError(f"a job can be asked to {', '.join(ACTIONS)}; got {action!r}")
        job = next((each for each in self._jobs if each.id == number), None)
        if job is None:
            raise ValueError(f"there is no job {number}")
        if reason := why_not(job, action):
            raise ValueError(f"job {number} cannot be asked to {action}: {reason}")
        jobs = self.cluster.jobs
        if action in ("up", "down"):
            wanted = job.priority + (1 if action == "up" else -1)
            work = partial(jobs.set_priority, number, wanted)
        else:
            work = partial(getattr(jobs, action), number)
        self.ask(str(number), work, _DOING[action])

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each job of the cluster, on every page."""
        with self._guard:
            return jobs_frame(self._jobs)

    def still(self) -> Markup:
        """The page as a table without scripts."""
        with self._guard:
            return _html(self._shown)

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        return f"<JobTable of cluster {self.cluster.name!r}: {told or 'no jobs'}>"

    @traitlets.observe("filter", "page", "page_size")
    def _looked_elsewhere(self, change: Mapping[str, Any]) -> None:
        self.refresh()


def _html(view: View) -> Markup:
    """A page of jobs."""
    head = ("job", "name", "state", "engines", "priority", "steps", "", "")
    rows = [
        (
            str(row["id"]),
            brief(row["name"]),
            row["state"],
            row["engines"],
            str(row["priority"]),
            f"{row['step']:,} of {row['steps']:,}",
            f"{row['when']} {_clock(row['at'])}".strip(),
            brief(row["reason"]),
        )
        for row in view["rows"]
    ]
    told = ", ".join(f"{count} {state}" for state, count in view["counts"].items()) or "no jobs"
    return table_html(view, f"Jobs of cluster {view['cluster']}: {told}", head, rows)


def _clock(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%H:%M:%S")
