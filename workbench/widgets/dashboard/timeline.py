"""What was predicted of a run, and timelines of a step, predicted and measured, for a view."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import KINDS, LANES, Span
from workbench.plan.machine.machine import Machine
from workbench.predict.measured import Timeline
from workbench.predict.memory.timeline import Category
from workbench.predict.prediction import Prediction, predict
from workbench.predict.time.simulation import Schedule
from workbench.widgets.base.widget import LatestWorker
from workbench.widgets.dashboard.runs import WatchedRun
from workbench.widgets.dashboard.series import CATEGORIES

# As `ranks.RankFigures` sums them up: what is only there within a step counts as activations.
_PART_OF: dict[Category, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "buckets": "gradients",
    "in_flight": "gradients",
    "codec": "gradients",
    "optimizer": "optimizer",
    "staging": "buffers",
    "data": "activations",
    "activations": "activations",
    "activation_gradients": "activations",
    "workspace": "activations",
}
NO_MACHINE = (
    "Time is predicted for a machine: dashboard.machine = cluster.calibrate(run.experiment.plan), "
    "or wb.Machine.preset('h100-nvlink')."
)


@dataclass(frozen=True, eq=False)
class RunForecast:
    """A prediction, as a dashboard shows it.

    Attributes:
        ranks: bytes of each of `series.CATEGORIES`, and bytes received in a step, [ranks, 6].
        reason: why there is no prediction, or what would predict more; "" where nothing is missing.
    """

    prediction: Prediction | None
    ranks: NDArray[np.float64]
    samples_per_s: float | None = None
    step_s: float | None = None
    reason: str = ""

    @classmethod
    def none(cls, reason: str = "") -> "RunForecast":
        """Nothing is predicted."""
        return cls(None, np.empty((0, len(CATEGORIES) + 1)), reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """What a view needs of it besides the ranks."""
        return {
            "samples_per_s": self.samples_per_s,
            "step_s": self.step_s,
            "reason": self.reason,
        }


def forecast_of(experiment: Experiment, machine: Machine | None) -> RunForecast:
    """What is predicted of an experiment; of its time only with a machine."""
    found = predict(experiment.plan, machine, experiment)
    rows = []
    for rank in range(experiment.plan.world_size):
        parts = dict.fromkeys(CATEGORIES, 0.0)
        for category, size in found.memory[rank].categories.items():
            parts[_PART_OF[category]] += size
        rows.append((*parts.values(), found.traffic.received_bytes(rank)))
    if machine is None:
        return RunForecast(found, np.array(rows), reason=NO_MACHINE)
    return RunForecast(found, np.array(rows), found.samples_per_s, found.step_time)


class Forecaster:
    """A thread that predicts what was asked for last.

    Args:
        found: Called on that thread with each forecast; it must not raise.
    """

    def __init__(self, found: Callable[[RunForecast], None]) -> None:
        self._found = found
        self._asked: tuple[object, object] | None = None
        self._latest: LatestWorker[tuple[Experiment, Machine | None]] = LatestWorker(
            self._work, "dashboard's predictions", lambda: None
        )
        self.settle, self.close = self._latest.settle, self._latest.close

    def ask(self, experiment: Experiment, machine: Machine | None) -> None:
        """Has an experiment predicted, unless it was asked for last."""
        # A learning rate, or another number of steps, changes nothing that is predicted.
        question = (
            (experiment.plan, experiment.sync, experiment.batch_size),
            machine,
        )
        if self._asked is None or not _same(self._asked, question):
            self._asked = question
            self._latest.ask((experiment, machine))

    def _work(self, question: tuple[Experiment, Machine | None]) -> None:
        try:
            found = forecast_of(*question)
        except Exception as error:  # it belongs into the widget, whatever it is
            found = RunForecast.none(f"No prediction: {error or type(error).__name__}")
        if not self._latest.superseded():
            self._found(found)


def _same(known: Sequence[object], asked: Sequence[object]) -> bool:
    return known[1] is asked[1] and known[0] == asked[0]


MOST_RANKS = 8  # at once
MOST_SPANS = 20_000
COLUMNS = 7


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """What some ranks do in one step.

    Attributes:
        spans: Rank, lane, kind, label (by their numbers), start and length in seconds, and bytes,
            of each span, [spans, 7].
        step: the index of a step that was measured; None: predicted.
        ranks: the first of the ranks, and how many there are.
    """

    spans: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, COLUMNS)))
    labels: tuple[tuple[str, str, str], ...] = ()
    step: int | None = None
    seconds: float = 0.0
    ranks: tuple[int, int] = (0, 0)
    left_out: int = 0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What a view needs besides the spans."""
        return {
            "labels": [list(label) for label in self.labels],
            "step": self.step,
            "seconds": self.seconds,
            "ranks": list(self.ranks),
            "left_out": self.left_out,
            "reason": self.reason,
        }


def timeline_of(
    timed: Schedule | Timeline, first: int = 0, step: int | None = None
) -> StepTimeline:
    """The timelines of `MOST_RANKS` ranks."""
    ranks = range(first, min(first + MOST_RANKS, timed.world_size))
    every = [span for rank in ranks for span in timed.spans(rank) if span.seconds > 0]
    kept = _largest(every, MOST_SPANS)
    numbers: dict[tuple[str, str, str], int] = {}
    rows = [
        (
            span.rank,
            LANES.index(span.lane),
            KINDS.index(span.what),
            numbers.setdefault((span.label, span.op, span.phase), len(numbers)),
            span.start_s,
            span.seconds,
            span.bytes,
        )
        for span in kept
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, COLUMNS)
    seconds = max([timed.seconds, *(span.end_s for span in every)])
    left_out = len(every) - len(kept)
    return StepTimeline(table, tuple(numbers), step, seconds, (first, len(ranks)), left_out)


def _largest(spans: Sequence[Span], most: int) -> Sequence[Span]:
    if len(spans) <= most:
        return spans
    least = sorted((span.seconds for span in spans), reverse=True)[most - 1]
    return [span for span in spans if span.seconds >= least][:most]


class TimelineCache:
    """Keeps the last ones; any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._of: tuple[object, ...] = ()
        self._timelines = (StepTimeline(), StepTimeline())

    def of(
        self, watched: WatchedRun, forecast: RunForecast, first: int
    ) -> tuple[StepTimeline, StepTimeline]:
        """As predicted, and as measured."""
        with self._lock:
            asked = (watched, watched.timeline, watched.untraced, forecast, first)
            if len(self._of) != len(asked) or not all(map(_is, asked, self._of)):
                self._of, self._timelines = asked, _drawn(watched, forecast, first)
            return self._timelines


def _drawn(
    watched: WatchedRun, forecast: RunForecast, first: int
) -> tuple[StepTimeline, StepTimeline]:
    predicted, measured = (
        StepTimeline(reason=forecast.reason),
        StepTimeline(reason=watched.untraced),
    )
    if forecast.prediction is not None and forecast.step_s is not None:
        predicted = timeline_of(forecast.prediction.timeline, first)
    if (timeline := watched.timeline) is not None:
        measured = timeline_of(timeline, first, timeline.step)
    return predicted, measured


def _is(a: object, b: object) -> bool:
    return a is b or (isinstance(a, int | str) and a == b)
