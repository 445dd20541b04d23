"""Messages to the views: plain values, and numbers in one buffer behind each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.widgets.dashboard import commands
from workbench.widgets.dashboard.forecast import Forecast
from workbench.widgets.dashboard.lanes import Lanes
from workbench.widgets.dashboard.watched import Watched


@dataclass(frozen=True)
class Scene:
    """All that a view shows.

    Attributes:
        watched: the runs by name.
        shown: the name of the one in detail.
        forecast: of it.
        lanes: of a step of it, predicted and measured.
        outcome: of the last control that was used.
    """

    watched: Mapping[str, Watched]
    shown: str
    forecast: Forecast
    lanes: tuple[Lanes, Lanes]
    outcome: Mapping[str, Any]


class Parcel:
    """One message.

    Attributes:
        content: as JSON can hold it; `parts` has the name and length of each part of the buffer.
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


class Sender:
    """Knows what the views know, and so what is new to them."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}
        self._begins = False

    def forget(self) -> None:
        """Has the next parcel hold everything."""
        self._begins = True

    def parcel(self, scene: Scene, *, whole: bool) -> Parcel:
        """What is new since the last one, or everything."""
        parcel, here = Parcel(), scene.watched[scene.shown]
        whole, self._begins = whole or self._begins, False

        def due(name: str, value: object) -> bool:
            return self._is_new(name, value) or whole

        runs = []
        for index, (name, each) in enumerate(scene.watched.items()):
            start, points = (0, each.series.points) if whole else each.series.take()
            facts = _facts(name, each)
            if due(f"facts {name}", facts) or points:
                runs.append({"index": index, "start": start, **facts})
                parcel.put(f"points {index}", np.array(points).reshape(-1, 4))
        if runs:
            names = list(scene.watched)
            shown = names.index(scene.shown)
            parcel.content |= {"runs": runs, "names": names, "shown": shown}
            parcel.put("ranks", here.series.figures)
        if due("engines", (here.limits.tobytes(), here.conditions)):
            parcel.content["conditions"] = list(here.conditions)
            parcel.put("limits", here.limits)
        if due("forecast", scene.forecast):
            parcel.content["forecast"] = scene.forecast.as_dict()
            parcel.put("forecast", scene.forecast.ranks)
        for name, lanes in zip(("predicted", "measured"), scene.lanes, strict=True):
            if due(name, lanes):
                parcel.content[name] = lanes.as_dict()
                parcel.put(name, lanes.spans)
        if due("events", (scene.shown, here.events.version)):
            parcel.content["events"] = [line.as_list() for line in here.events.lines]
        if due("outcome", scene.outcome):
            parcel.content["outcome"] = dict(scene.outcome)
        return parcel

    def _is_new(self, name: str, value: object) -> bool:
        """Whether this is not what the views know; they do, from now on."""
        if name in self._known and self._known[name] == value:
            return False
        self._known[name] = value
        return True


def _facts(name: str, watched: Watched) -> dict[str, Any]:
    series, status = watched.series, watched.status
    told = {"stride": series.stride, "recent": series.recent}
    can = commands.possible(watched.run, status.state)
    return {"name": name, "status": {**status.as_dict(), **told, "can": can}}
