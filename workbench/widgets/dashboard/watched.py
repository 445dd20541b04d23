"""The runs of a dashboard, by name, each as far as it has been read."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.predict.measured import Timeline
from workbench.store.errors import ClusterError, StoreError
from workbench.store.evaluations import read_evaluations
from workbench.widgets.dashboard.run import ENDED, Events, Run, Status, metric_of
from workbench.widgets.dashboard.series import Series

LOOK_EVERY_S = 1.0
# Reading a trace takes its time, and there may be one in every step.
TRACE_EVERY_S, TRACE_SHARE = 1.0, 0.05
NOT_TRACED = (
    "No step is traced: train experiment.replace(trace_every=5), and every fifth step shows here "
    "what each rank did when."
)


class WatchedRun:
    """Reads what is new of a run; one thread at a time.

    Args:
        run: the run that is read.
        guard: the lock that is held while what has been read changes.

    Attributes:
        run: the run that is read.
        series: what was measured over its steps.
        events: what happened to it.
        status: the run's state, and how far it has come.
        timeline: the last step that was traced, or None.
        untraced: why there is no timeline, for people.
        limits: bytes of each rank's device, [ranks]; NaN where that is not known.
        conditions: what was done to the engine of each rank, "paused" or "2.0x slower"; or "".
    """

    def __init__(self, run: Run, guard: RLock) -> None:
        self.run, self._guard = run, guard
        world = run.experiment.plan.world_size
        self.series, self.events, self.status = Series(world), Events(run), Status()
        self.timeline: Timeline | None = None
        self.untraced = ""
        self.limits: NDArray[np.float64] = np.full(world, math.nan)
        self.conditions: tuple[str, ...] = ("",) * world
        self._num_read, self._looked_at, self._trace_at = 0, -math.inf, -math.inf

    def read(self) -> None:
        """Takes in what is new."""
        # The state first: the rows of a run that has ended are complete. And nothing of the run
        # under the guard, which messages need: the run has locks of its own.
        state = self.run.state
        rows, self._num_read = self.run.rows.since(self._num_read)
        metric = metric_of(self.run)
        last = self.run.evaluation.get(metric, math.nan)
        if rows and metric != "accuracy":
            found = read_evaluations(self.run.directory)
            rows = [
                {**row, "accuracy": found.get(int(row["step"]) + 1, {}).get(metric, math.nan)}
                for row in rows
            ]
        with self._guard:
            self.series.spread_over(self.run.experiment.plan.world_size)
            self.series.extend(rows)
            if state in ENDED:
                self.series.settle()
                self.series.measured(last)
        status = Status.of(self.run, self.series, state)
        now = time.monotonic()
        if status != self.status or now - self._looked_at >= LOOK_EVERY_S:
            self._look(now, has_turned=state != self.status.state)
        self.status = status
        self._trace(now, state)

    @property
    def is_lost(self) -> bool:
        """Whether its cluster went away while it ran."""
        return self.status.state == "failed" and isinstance(self.run.error, ClusterError)

    def successor(self) -> Run | None:
        """A run that follows the same job, which its cluster goes on with; None: there is none."""
        cluster, number = self.run.cluster, self.run.id
        if cluster is None or number is None:
            return None
        with suppress(ClusterError, KeyError):
            if cluster.link.is_kept and not cluster.link.store.job(number).has_ended:
                found: Run = cluster.jobs[number]
                return found
        return None

    def _look(self, now: float, *, has_turned: bool) -> None:
        """At what the job server knows, which takes a query or two."""
        if now - self._looked_at < LOOK_EVERY_S and not has_turned:
            with self._guard:
                self.events.read()
            return
        self._looked_at = now
        try:
            limits, conditions = self._engines()
        except (StoreError, ClusterError, IndexError):  # gone; the last ones are kept
            limits, conditions = self.limits, self.conditions
        with self._guard:
            self.events.read()
            self.limits, self.conditions = limits, conditions

    def _engines(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        world = self.series.world_size
        limits, conditions = np.full(world, math.nan), [""] * world
        cluster = self.run.cluster
        if cluster is None:
            return limits, tuple(conditions)
        slowed: dict[int, float] = cluster.slowed
        known: Any = {engine.index: engine for engine in cluster.link.store.engines()}
        for rank, place in enumerate(self.run.engines[:world]):
            limits[rank] = known[place].memory_bytes if place in known else math.nan
            if place in slowed:
                conditions[rank] = f"{slowed[place]:.1f}× slower"
            elif place in known and known[place].state in ("paused", "dead"):
                conditions[rank] = known[place].state
        return limits, tuple(conditions)

    def _trace(self, now: float, state: str) -> None:
        """Reads the last traced step, where there is a new one."""
        every = getattr(self.run.experiment, "trace_every", 0)
        if not every:
            self.untraced = NOT_TRACED
            return
        due = self.series.done // every * every - 1
        known = -1 if self.timeline is None else self.timeline.step
        if due <= known or (now < self._trace_at and state not in ENDED):
            return
        began = time.monotonic()
        try:
            self.timeline, self.untraced = self.run.timeline(), ""
        except (ClusterError, ValueError, OSError) as error:
            self.untraced = str(error)
        took = time.monotonic() - began
        self._trace_at = now + max(TRACE_EVERY_S, took / TRACE_SHARE)


class WatchedRuns(Mapping[str, WatchedRun]):
    """Each run is watched from when it is added until another takes its name.

    Args:
        guard: the lock that is held while what has been read changes.
        notify: Called, on any thread, when there may be news.
    """

    def __init__(self, guard: RLock, notify: Callable[[], None]) -> None:
        self._guard, self._notify = guard, notify
        self._watched: dict[str, WatchedRun] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}

    def watch(self, runs: Mapping[str, Run]) -> None:
        """Watches these and no others; what has been read of those that stay is kept."""
        before, watched = self._watched, dict[str, WatchedRun]()
        for name, run in runs.items():
            known = before.get(name)
            if known is not None and known.run is run:
                watched[name] = known
                continue
            self._leave(name)
            self._unsubscribe[name] = run.subscribe(lambda _rows: self._notify())
            watched[name] = WatchedRun(run, self._guard)
        for name in before.keys() - runs.keys():
            self._leave(name)
        self._watched = watched  # at once: other threads go through it

    def close(self) -> None:
        """Lets go of the runs; what was read stays."""
        for name in list(self._unsubscribe):
            self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self._unsubscribe:
            self._unsubscribe.pop(name)()

    def __getitem__(self, name: str) -> WatchedRun:
        return self._watched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._watched))

    def __len__(self) -> int:
        return len(self._watched)
