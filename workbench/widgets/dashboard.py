"""A live view of one run: loss, throughput, memory and time per rank, and a Stop button."""

import math
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import traitlets

from workbench.widgets import snapshot
from workbench.widgets.series import RankFigures, Series
from workbench.widgets.status import ENDED, Run, Status
from workbench.widgets.widget import Widget

Points = Iterable[Sequence[float]]


class Dashboard(Widget):
    """Shows a run while it trains, or after it.

    The run only *notifies*: a thread of the dashboard's own then reads what is new, joins it
    and sends it, so a slow browser never holds up the run. Whatever the step rate, views get
    at most one message per `interval_s`, and always the last state.

    Args:
        run: the run to show, in any state.
        interval_s: least seconds between two messages.
    """

    script = "dashboard"

    # What a view without a kernel starts from. Set at the beginning and at the end of the run;
    # in between, views get messages with only what is new, and a late one asks for everything.
    _points = traitlets.Bytes().tag(sync=True)
    _ranks = traitlets.Bytes().tag(sync=True)
    _status = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Run, *, interval_s: float = 0.1) -> None:
        self.run, self.interval_s = run, interval_s
        self._history = Series(run.experiment.plan.world_size)
        self._num_read = 0
        self._complaint = ""
        self._reading, self._guard = threading.Lock(), threading.RLock()
        self._news, self._closing = threading.Event(), threading.Event()
        self._latest = Status()
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
        self._unsubscribe = run.subscribe(lambda _rows: self._news.set())
        self._read()
        super().__init__(**self._saved())
        self.on_msg(self._receive)
        self._thread.start()

    @property
    def status(self) -> Status:
        """Where the run stands."""
        self._read()
        return self._latest

    @property
    def state(self) -> str:
        """The run's state."""
        return self.status.state

    @property
    def series(self) -> dict[str, list[float]]:
        """What the line charts show: "step", "loss", "samples_per_s", "accuracy"; NaN is a gap."""
        self._read()
        with self._guard:
            return self._history.columns

    @property
    def ranks(self) -> list[RankFigures]:
        """What the bars show, for rank 0, 1, ..."""
        self._read()
        with self._guard:
            return self._history.ranks

    def close(self) -> None:
        """Ends the view; the run goes on."""
        if not self._closing.is_set():
            self._closing.set()
            self._news.set()
            self._unsubscribe()
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()  # it may be sending, and a closed widget cannot
        super().close()

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._news.clear()
            self._read()
            self._send_news()
            if self._latest.ended:
                self._save()  # and wait: it may be resumed
            if self._closing.wait(self.interval_s):
                return
            self._news.wait()

    def _read(self) -> None:
        # The state first: the rows of a run that has ended are complete. And nothing of the run
        # under the guard, which messages need: the run has locks of its own.
        with self._reading:
            state = self.run.state
            rows = self.run.rows[self._num_read :]
            accuracy = self.run.evaluation.get("accuracy", math.nan)
            self._num_read += len(rows)
            with self._guard:
                self._history.extend(rows)
                if state in ENDED:
                    self._history.settle()
                    self._history.measured(accuracy)
            status = Status.of(self.run, self._history, state)
            self._latest = replace(status, error=self._complaint or status.error)

    def _send_news(self) -> None:
        with self._guard:
            self._send_points(*self._history.take())

    def _send_points(self, start: int, points: Points) -> None:
        content = {"type": "update", "start": start, "status": self._facts()}
        self.send(content, buffers=[_doubles(points), self._figures()])

    def _facts(self) -> dict[str, Any]:
        stride, recent = self._history.stride, self._history.recent
        return {**self._latest.as_dict(), "stride": stride, "recent": recent}

    def _figures(self) -> bytes:
        return _doubles(rank.flat() for rank in self._history.ranks)

    def _saved(self) -> dict[str, Any]:
        with self._guard:
            points = _doubles(self._history.points)
            return {"_points": points, "_ranks": self._figures(), "_status": self._facts()}

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        if content.get("type") == "hello":
            with self._guard:
                self._send_points(0, self._history.points)
        elif content.get("type") == "stop":
            try:
                self.run.stop()
            except Exception as error:  # it must not be lost: the button was pressed in vain
                self._complaint = f"Stop did not reach the run: {error}"
            self._news.set()

    def _save(self) -> None:
        # Traits are what a saved notebook holds; pictures, what one holds without widgets.
        for name, value in self._saved().items():
            setattr(self, name, value)
        self.keep()

    def still(self) -> str:
        """Charts and a table of the ranks, as they are now."""
        self._read()
        with self._guard:
            return snapshot.html(self._history, self._latest)

    def __repr__(self) -> str:
        return f"<Dashboard: {self.status}>"


def _doubles(rows: Points) -> bytes:
    return array("d", [value for row in rows for value in row]).tobytes()
