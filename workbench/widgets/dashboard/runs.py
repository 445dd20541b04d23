"""The runs of a dashboard, as far as each was read: where it stands, and what happened to it."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.client.run.run import Run as Run
from workbench.plan.io.units import digits, duration, percent
from workbench.predict.measured import Timeline
from workbench.store.errors import ClusterError, StoreError
from workbench.store.run_folder import read_evaluations
from workbench.widgets.dashboard.series import Series

ENDED = ("finished", "stopped", "failed")


def runs_of(given: object) -> dict[str, Run]:
    """Runs by the names that they are shown under.

    Raises:
        TypeError: none of these.
        ValueError: there is no run.
    """
    if isinstance(given, Mapping):
        found = {str(name): run for name, run in given.items()}
    else:
        several = list(given) if isinstance(given, Sequence) else [given]
        found = {}
        for index, run in enumerate(several):
            name = f"job {number}" if (number := getattr(run, "id", None)) else f"run {index + 1}"
            found[name if name not in found else f"{name} ({index + 1})"] = run
    if not found:
        raise ValueError("a dashboard shows a run, or several; there is none")
    for run in found.values():
        if not hasattr(run, "subscribe") or not hasattr(run, "rows"):
            raise TypeError(
                f"a dashboard shows runs, as cluster.train(experiment) or cluster.jobs[id] give "
                f"them; got {type(run).__name__}"
            )
    return found


def metric_of(run: Run) -> str:
    """What is shown of a run's evaluations besides the loss."""
    return next(iter(getattr(run.experiment, "figures", ())), "accuracy")


def said(metric: str, value: float) -> str:
    """A value of it, for people."""
    return percent(value) if metric == "accuracy" else digits(value)


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        elapsed_s: seconds since the first step's report.
        left_s: seconds to go at the recent speed; None where that is unknown or nothing.
        metric: what is measured on the test split besides the loss: "accuracy", or the first of
            the experiment's own metrics.
    """

    state: str = "starting"
    stopping: bool = False
    done: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    metric: str = "accuracy"
    accuracy: float | None = None
    error: str = ""
    reason: str = ""
    lr: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run, series: Series, state: str) -> "Status":
        """Puts together what a run says of itself and what its series say.

        `state` is the run's, as it was before the series were read.
        """
        ended, steps = state in ENDED, run.experiment.steps
        left_s = (steps - series.done) * series.seconds_per_step
        error = run.error
        return cls(
            state=state,
            stopping=run.is_stopping and not ended,
            done=series.done,
            steps=steps,
            elapsed_s=series.elapsed_s,
            left_s=None if ended or not math.isfinite(left_s) else left_s,
            metric=metric_of(run),
            accuracy=series.accuracy if math.isfinite(series.accuracy) else None,
            error="" if error is None else str(error) or type(error).__name__,
            reason=run.reason,
            lr=getattr(getattr(run.experiment, "optimizer", None), "lr", None),
            notes=tuple(run.notes),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED

    @property
    def advice(self) -> str:
        """What to do next, for a run that failed."""
        if self.state != "failed":
            return ""
        if "cluster.restart()" in self.error or "Cluster.attach" in self.error:
            return (
                "The picture is the last one. cluster.restart(), or wb.Cluster.attach(name) after "
                "a kernel's restart, starts engines that go on with its jobs; this view follows "
                "the job again, or dashboard.run = cluster.jobs[id] has it do so."
            )
        return (
            "Nothing that was measured is lost: run.metrics has the steps so far, and "
            "run.directory the last checkpoint. print(run.error) shows the whole message; once "
            "its cause is gone, Resume goes on from there."
        )

    def as_dict(self) -> dict[str, Any]:
        """The values by name, as JSON can hold them."""
        told = asdict(self)
        del told["notes"]  # they are among the events
        return {**told, "ended": self.ended, "advice": self.advice}

    def __str__(self) -> str:
        elapsed = f"{duration(self.elapsed_s)} elapsed"
        parts = [self.state, f"{self.done} of {self.steps} steps", elapsed]
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        if self.accuracy is not None:
            parts.append(f"test {self.metric} {said(self.metric, self.accuracy)}")
        return ", ".join(parts)


KEPT = 200


@dataclass(frozen=True)
class EventLine:
    """One line.

    Attributes:
        time: seconds since the epoch; None: it was before anybody looked.
    """

    time: float | None
    level: str
    text: str

    def as_list(self) -> list[float | str | None]:
        """As JSON can hold it."""
        return [self.time, self.level, self.text]


class Events:
    """The last `KEPT` lines of one run."""

    def __init__(self, run: Run) -> None:
        self._run, self.version = run, 0
        self._lines: deque[EventLine] = deque(maxlen=KEPT)
        self._newest = self._num_notes = 0
        self._began = False

    @property
    def lines(self) -> list[EventLine]:
        """The oldest first."""
        return list(self._lines)

    def read(self) -> None:
        """Takes in what is new."""
        found: Sequence[EventLine] = ()
        with suppress(StoreError):  # the cluster is gone; the run says so
            events = self._run.events(self._newest)
            self._newest = max((event.id for event in events), default=self._newest)
            found = [EventLine(event.time, event.level, event.text) for event in events]
        notes = list(self._run.notes)
        now = time.time() if self._began else None
        noted = [EventLine(now, "info", note) for note in notes[self._num_notes :]]
        self._num_notes, self._began = len(notes), True
        for line in (*found, *noted):
            self._add(line)

    def add(self, text: str, level: str = "info") -> None:
        """Notes what was done from here."""
        self._add(EventLine(time.time(), level, text))

    def _add(self, line: EventLine) -> None:
        self._lines.append(line)
        self.version += 1


LOOK_EVERY_S = 1.0
# Reading a trace takes its time, and there may be one in every step.
TRACE_EVERY_S, TRACE_SHARE = 1.0, 0.05
NOT_TRACED = (
    "No step is traced: train experiment.replace(trace_every=5), and every fifth step shows here "
    "what each rank did when."
)


class WatchedRun:
    """Reads what is new of a run; one thread at a time.

    Attributes:
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
        number = self.run.id
        cluster: Any = self.run.cluster
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
    """Each run is watched from when it is added until another takes its name."""

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
