"""Timelines of a step, predicted and measured, as numbers that a view can draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.metrics import KINDS, LANES, Span
from workbench.widgets.dashboard.forecast import RunForecast
from workbench.widgets.dashboard.watched import WatchedRun

MOST_RANKS = 8  # at once
MOST_SPANS = 20_000
COLUMNS = 7


class Timed(Protocol):
    """A step in time: `predict.Schedule` and `predict.measured.Timeline` are such."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def seconds(self) -> float:
        """Of the step."""

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What one rank does, in the order in which it begins."""


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """What some ranks do in one step.

    Attributes:
        spans: Rank, lane, kind, label (by their numbers), start and length in seconds, and bytes,
            of each span, [spans, 7].
        labels: label, operation and phase, by number.
        step: the index of a step that was measured; None: predicted.
        seconds: seconds of the step.
        ranks: the first of the ranks, and how many there are.
        left_out: number of spans that were too many.
        reason: why there are no spans, for people.
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


def timeline_of(timed: Timed, first: int = 0, step: int | None = None) -> StepTimeline:
    """The timelines of `MOST_RANKS` ranks.

    Args:
        timed: the step.
        first: the first of the ranks.
        step: the step's index, where it was measured.
    """
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
        """As predicted, and as measured.

        Args:
            watched: the run.
            forecast: what is predicted of it.
            first: the first of the ranks.
        """
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
