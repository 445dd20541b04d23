"""The jobs of a cluster as a live table: what runs, what waits, and buttons to change that."""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.store.record import JobRecord
from workbench.widgets.live import View
from workbench.widgets.tables import still
from workbench.widgets.tables.board import Board
from workbench.widgets.tables.job_rows import ACTIONS, counts, page_of, row, why_not
from workbench.widgets.tables.ledger import Ledger

if TYPE_CHECKING:
    from workbench.store.store import Store

_DOING = {
    "pause": "is asked to pause …",
    "resume": "is asked to go on …",
    "stop": "is asked to stop …",
    "cancel": "is cancelled …",
    "up": "gets a higher priority …",
    "down": "gets a lower priority …",
}


class JobTable(Board):
    """All jobs of a cluster, live: state, engines, progress, predicted end, and why they wait.

    Args:
        cluster: whose jobs.
        state: first values of the attributes.

    Attributes:
        cluster: as given; another one may be assigned.
        filter: words that a job must have in its number, name, state, sweep or reason.
        page: which part is shown, from 1 on.
        page_size: jobs on a page, 1 to 200.
        counts: jobs in each state; read-only.

    Raises:
        TypeError: no cluster.
    """

    script = "jobtable"

    filter = traitlets.Unicode()
    page = traitlets.Int(1)
    page_size = traitlets.Int(20, min=1, max=200)
    counts = traitlets.Dict(read_only=True)

    def __init__(self, cluster: Any, **state: Any) -> None:
        self._ledger: Ledger | None = None
        self._jobs: tuple[JobRecord, ...] = ()
        self._read_at = time.time()
        super().__init__(cluster, **state)

    @property
    def jobs(self) -> tuple[JobRecord, ...]:
        """All of them as they were last read, in the order of submission."""
        return self._jobs

    def take(self, store: "Store") -> None:
        """Reads the jobs that may have changed."""
        if self._ledger is None or self._ledger.store is not store:
            self._ledger = Ledger(store)
        jobs, now = self._ledger.read(), time.time()
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
        """Turns pages, filters, or asks something of a job."""
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
            work = partial(jobs.prioritise, number, wanted)
        else:
            work = partial(getattr(jobs, action), number)
        self.ask(str(number), work, _DOING[action])

    def still(self) -> str:
        """The page as a table without scripts."""
        with self._guard:
            return still.jobs_html(self._shown)

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        return f"<JobTable of cluster {self.cluster.name!r}: {told or 'no jobs'}>"

    @traitlets.observe("filter", "page", "page_size")
    def _looked_elsewhere(self, change: Mapping[str, Any]) -> None:
        self.refresh()
