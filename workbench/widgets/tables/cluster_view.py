"""The engines of a cluster, live: device, state, job, processor and memory of each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.plan.io.html import Markup, frame_of
from workbench.plan.io.units import size
from workbench.store.record import EngineRecord, JobRecord, JobState
from workbench.store.store import Store
from workbench.widgets.base.widget import View
from workbench.widgets.tables.cluster_table import ClusterTable, brief, table_html

if TYPE_CHECKING:
    import pandas


def rows(
    engines: Sequence[EngineRecord], devices: Sequence[object], jobs: Mapping[int, JobRecord]
) -> list[dict[str, Any]]:
    """One for each engine; the assistant, which serves the others, comes last."""
    return [
        {
            "index": engine.index,
            "label": "assistant" if engine.is_assistant else str(engine.index),
            "device": _device(engine, devices),
            "kind": engine.kind,
            "state": engine.state,
            "job": "" if engine.job is None else _job(engine.job, jobs),
            "rank": _rank(engine, jobs),
            "cpu_share": round(engine.cpu_share, 2),
            "used_bytes": engine.gpu_bytes if engine.kind == "cuda" else engine.rss_bytes,
            "host_bytes": engine.rss_bytes,
            "memory_bytes": engine.memory_bytes,
            "pid": engine.pid,
            "death": engine.death,
        }
        for engine in sorted(engines, key=lambda each: (each.is_assistant, each.index))
    ]


def summary(engines: Sequence[EngineRecord], jobs: Sequence[JobRecord]) -> str:
    """How many engines are in which state, and how many jobs wait."""
    ranks = [engine for engine in engines if not engine.is_assistant]
    states: dict[str, int] = {}
    for engine in ranks:
        states[engine.state] = states.get(engine.state, 0) + 1
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    number = f"{len(ranks)} engine{'s' * (len(ranks) != 1)}"
    waiting = sum(job.state == "queued" for job in jobs)
    queue = f"; {waiting} job{'s' * (waiting != 1)} waiting" if waiting else ""
    return f"{number}: {told}{queue}" if told else f"no engines{queue}"


def _device(engine: EngineRecord, devices: Sequence[object]) -> str:
    if engine.index < len(devices):
        known = devices[engine.index]
        host = getattr(known, "host", "")
        return f"{known} on {host}" if host else str(known)
    return engine.name


def _job(number: int, jobs: Mapping[int, JobRecord]) -> str:
    return f"{number}: {jobs[number].name}" if number in jobs else str(number)


def _rank(engine: EngineRecord, jobs: Mapping[int, JobRecord]) -> int | None:
    """Which rank of its job an engine is."""
    job = None if engine.job is None else jobs.get(engine.job)
    held = () if job is None else job.held
    return held.index(engine.index) if engine.index in held else None


_LIVE: tuple[JobState, ...] = ("queued", "starting", "running", "stopping")


class ClusterView(ClusterTable):
    """What each engine of a cluster computes on, how busy it is, and what for.

    Args:
        cluster: the cluster whose engines are shown.
        state: first values of the attributes.

    Attributes:
        cluster: the cluster; another one may be assigned.
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

    def take(self, store: Store) -> None:
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
        """Nothing can be asked of engines here: `cluster.pause`, `slow` and `kill` are faults.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"there is no {content['type']!r} to do")

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each engine, as it is shown."""
        with self._guard:
            rows: list[dict[str, Any]] = self._shown["rows"]
            return frame_of(rows, list(rows[0]) if rows else ("index", "state"))

    def still(self) -> Markup:
        """The engines as a table without scripts."""
        with self._guard:
            return _html(self._shown)

    def __repr__(self) -> str:
        return f"<ClusterView of {self.cluster.name!r}: {summary(self._engines, self._jobs)}>"


def _html(view: View) -> Markup:
    """The engines."""
    head = ("engine", "device", "state", "job", "processor", "memory")
    rows = [
        (
            row["label"],
            brief(row["device"]),
            row["state"],
            brief(row["job"]),
            f"{100 * row['cpu_share']:.0f} %",
            f"{size(row['used_bytes'])} of {size(row['memory_bytes'])}",
        )
        for row in view["rows"]
    ]
    return table_html(view, f"Cluster {view['cluster']}: {view['said']}", head, rows)
