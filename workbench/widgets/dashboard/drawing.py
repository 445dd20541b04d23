"""The two timelines of a dashboard, made anew only where one has changed."""

from threading import Lock

from workbench.widgets.dashboard.forecast import Forecast
from workbench.widgets.dashboard.lanes import Lanes, lanes_of
from workbench.widgets.dashboard.watched import Watched


class Drawing:
    """Keeps the last ones; any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._of: tuple[object, ...] = ()
        self._lanes = (Lanes(), Lanes())

    def of(self, watched: Watched, forecast: Forecast, first: int) -> tuple[Lanes, Lanes]:
        """As predicted, and as measured.

        Args:
            watched: the run.
            forecast: of it.
            first: of the ranks.
        """
        with self._lock:
            asked = (watched, watched.timeline, watched.untraced, forecast, first)
            if len(self._of) != len(asked) or not all(map(_is, asked, self._of)):
                self._of, self._lanes = asked, _drawn(watched, forecast, first)
            return self._lanes


def _drawn(watched: Watched, forecast: Forecast, first: int) -> tuple[Lanes, Lanes]:
    predicted, measured = Lanes(reason=forecast.reason), Lanes(reason=watched.untraced)
    if forecast.prediction is not None and forecast.step_s is not None:
        predicted = lanes_of(forecast.prediction.timeline, first)
    if (timeline := watched.timeline) is not None:
        measured = lanes_of(timeline, first, timeline.step)
    return predicted, measured


def _is(a: object, b: object) -> bool:
    return a is b or (isinstance(a, int | str) and a == b)
