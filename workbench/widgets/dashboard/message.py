"""Messages to the views: plain values, and numbers in one buffer behind each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.widgets.dashboard import commands
from workbench.widgets.dashboard.runs import WatchedRun
from workbench.widgets.dashboard.timeline import RunForecast, StepTimeline


@dataclass(frozen=True)
class DashboardState:
    """All that a view shows."""

    watched: Mapping[str, WatchedRun]
    shown: str
    forecast: RunForecast
    timelines: tuple[StepTimeline, StepTimeline]
    outcome: Mapping[str, Any]


class Message:
    """One message.

    Attributes:
        content: plain values, as JSON can hold them; `parts` has the name and length of each part
            of the buffer.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {"type": "update", "parts": []}
        self._buffers: list[bytes] = []

    def put(self, name: str, numbers: Sequence[Sequence[float]] | NDArray[np.float64]) -> None:
        """Adds numbers under a name."""
        packed = np.asarray(numbers, dtype=np.float64).tobytes()
        self.content["parts"].append([name, len(packed)])
        self._buffers.append(packed)

    @property
    def buffer(self) -> bytes:
        """All parts."""
        return b"".join(self._buffers)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return len(self.content) == 2 and not self._buffers


class MessageMaker:
    """Knows what the views know, and so what is new to them."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}
        self._begins = False

    def forget(self) -> None:
        """Has the next message hold everything."""
        self._begins = True

    def message(self, state: DashboardState, *, whole: bool) -> Message:
        """What is new since the last one, or everything."""
        message, here = Message(), state.watched[state.shown]
        whole, self._begins = whole or self._begins, False

        def due(name: str, value: object) -> bool:
            return self._is_new(name, value) or whole

        runs = []
        for index, (name, each) in enumerate(state.watched.items()):
            start, points = (0, each.series.points) if whole else each.series.take()
            facts = _facts(name, each)
            if due(f"facts {name}", facts) or points:
                runs.append({"index": index, "start": start, **facts})
                message.put(f"points {index}", np.array(points).reshape(-1, 4))
        if runs:
            names = list(state.watched)
            shown = names.index(state.shown)
            message.content |= {"runs": runs, "names": names, "shown": shown}
            message.put("ranks", here.series.figures)
        if due("engines", (here.limits.tobytes(), here.conditions)):
            message.content["conditions"] = list(here.conditions)
            message.put("limits", here.limits)
        if due("forecast", state.forecast):
            message.content["forecast"] = state.forecast.as_dict()
            message.put("forecast", state.forecast.ranks)
        for name, timeline in zip(("predicted", "measured"), state.timelines, strict=True):
            if due(name, timeline):
                message.content[name] = timeline.as_dict()
                message.put(name, timeline.spans)
        if due("events", (state.shown, here.events.version)):
            message.content["events"] = [line.as_list() for line in here.events.lines]
        if due("outcome", state.outcome):
            message.content["outcome"] = dict(state.outcome)
        return message

    def _is_new(self, name: str, value: object) -> bool:
        """Whether this is not what the views know; they do, from now on."""
        if name in self._known and self._known[name] == value:
            return False
        self._known[name] = value
        return True


def _facts(name: str, watched: WatchedRun) -> dict[str, Any]:
    series, status = watched.series, watched.status
    told = {"stride": series.stride, "recent": series.recent}
    can = commands.possible(watched.run, status.state)
    return {"name": name, "status": {**status.as_dict(), **told, "can": can}}
