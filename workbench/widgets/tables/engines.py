"""The engines of a cluster, live: device, state, job, processor and memory of each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.store.record import EngineRecord, JobRecord, State
from workbench.widgets.live import View
from workbench.widgets.tables import still
from workbench.widgets.tables.board import Board
from workbench.widgets.tables.engine_rows import rows, summary

if TYPE_CHECKING:
    from workbench.store.store import Store

_LIVE: tuple[State, ...] = ("queued", "starting", "running", "stopping")


class ClusterView(Board):
    """What each engine of a cluster computes on, how busy it is, and what for.

    Args:
        cluster: whose engines.
        state: first values of the attributes.

    Attributes:
        cluster: as given; another one may be assigned.
        states: for each engine that takes ranks, "idle", "busy", "paused", "starting" or "dead";
            read-only.

    Raises:
        TypeError: no cluster.
    """

    script = "clusterview"

    states: traitlets.List[str] = traitlets.List(read_only=True)

    def __init__(self, cluster: Any, **state: Any) -> None:
        self._engines: tuple[EngineRecord, ...] = ()
        self._jobs: tuple[JobRecord, ...] = ()
        super().__init__(cluster, **state)

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        """As they were last read, the assistant with them."""
        return self._engines

    def take(self, store: "Store") -> None:
        """Reads the engines, and the jobs that have or want them."""
        engines = store.engines()
        jobs = {job.id: job for job in store.jobs(states=_LIVE)}
        for engine in engines:  # leases and calls hold engines, too
            if engine.job is not None and engine.job not in jobs:
                jobs[engine.job] = store.job(engine.job)
        with self._guard:
            before = list(self.states)
            self._engines, self._jobs = engines, tuple(jobs.values())
            self.set_trait("states", [e.state for e in engines if not e.is_assistant])
            self.refresh()
            if before != self.states:
                self.keep_soon()

    def view(self) -> View:
        """A row for each engine."""
        return {
            "cluster": self.cluster.name,
            "said": summary(self._engines, self._jobs),
            "rows": rows(self._engines, self.cluster.devices, {job.id: job for job in self._jobs}),
            "gone": self._gone,
            "error": self._told.get("", ""),
        }

    def act(self, content: Mapping[str, Any]) -> None:
        """Nothing can be asked of engines here: `cluster.pause`, `slow` and `kill` are faults."""
        raise ValueError(f"there is no {content['type']!r} to do")

    def still(self) -> str:
        """The engines as a table without scripts."""
        with self._guard:
            return still.engines_html(self._shown)

    def __repr__(self) -> str:
        return f"<ClusterView of {self.cluster.name!r}: {summary(self._engines, self._jobs)}>"
