"""A run as a dashboard sees it: what it needs of one, where it stands, and what happened to it."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from workbench.client.run.rows import Rows
from workbench.plan.io.units import digits, duration, percent
from workbench.predict.measured import Timeline
from workbench.store.errors import StoreError
from workbench.widgets.dashboard.series import Series

ENDED = ("finished", "stopped", "failed")


class Run(Protocol):
    """A run; `workbench.client.Run` is one, and more."""

    @property
    def id(self) -> int | None:
        """The number of its job."""

    @property
    def state(self) -> str:
        """Is "queued", "starting", "running", "paused", "finished", "stopped" or "failed"."""

    @property
    def reason(self) -> str:
        """Says why it waits; "" while it does not."""

    @property
    def is_stopping(self) -> bool:
        """Tells whether it was asked to stop."""

    @property
    def experiment(self) -> Any:
        """What runs."""

    @property
    def rows(self) -> Rows:
        """Grows: one row for each step and rank, in the order of arrival."""

    @property
    def directory(self) -> Path:
        """Its folder, in which its evaluations are."""

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Holds the figures of the last evaluation once the run has ended."""

    @property
    def error(self) -> BaseException | None:
        """Says why it failed."""

    @property
    def notes(self) -> Sequence[str]:
        """Says what else should be known."""

    @property
    def cluster(self) -> Any:
        """Whose engines it runs on, or None."""

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank."""

    def events(self, after: int = 0) -> Sequence[Any]:
        """What the job server noted of it."""

    def timeline(self, step: int | None = None) -> Timeline:
        """What every rank did in a step that was traced."""

    def stop(self) -> None:
        """Asks the run to end after its current step."""

    def pause(self) -> None:
        """Has it give its engines back until it is resumed."""

    def resume(self) -> Any:
        """Goes on."""

    def set_lr(self, value: float) -> Any:
        """Goes on at another learning rate; what it gives can be waited for."""

    def checkpoint_now(self) -> Any:
        """Leaves a checkpoint; what it gives can be waited for."""

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Calls a function on changes, from some thread; gives what ends that."""


def runs_of(given: object) -> dict[str, Run]:
    """Runs by the names that they are shown under.

    Args:
        given: a run, several, or several by name.

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
        state: the run's own word.
        stopping: whether it was asked to stop and has not ended yet.
        done: steps that every rank has reported.
        steps: steps of the whole experiment.
        elapsed_s: seconds since the first step's report.
        left_s: seconds to go at the recent speed; None where that is unknown or nothing.
        metric: what is measured on the test split besides the loss: "accuracy", or the first of
            the experiment's own metrics.
        accuracy: its last value.
        error: why it failed, or "".
        reason: why it waits, or "".
        lr: its learning rate; None: unknown.
        notes: what else should be known.
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
        level: one of "info", "warning" or "error".
        text: what happened.
    """

    time: float | None
    level: str
    text: str

    def as_list(self) -> list[float | str | None]:
        """As JSON can hold it."""
        return [self.time, self.level, self.text]


class Events:
    """The last `KEPT` lines of one run.

    Args:
        run: the run whose events they are.

    Attributes:
        version: a number that grows with each line.
    """

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
