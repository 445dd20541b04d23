"""What happened to a run, for people: the job server's events, notes, and what was clicked."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from workbench.store.errors import StoreError
from workbench.widgets.dashboard.run import Run

KEPT = 200


@dataclass(frozen=True)
class Happening:
    """One line.

    Attributes:
        time: in seconds since the epoch; None: before anybody looked.
        level: "info", "warning" or "error".
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
        run: whose.

    Attributes:
        version: grows with each line.
    """

    def __init__(self, run: Run) -> None:
        self._run, self.version = run, 0
        self._lines: deque[Happening] = deque(maxlen=KEPT)
        self._newest = self._num_notes = 0
        self._began = False

    @property
    def lines(self) -> list[Happening]:
        """The oldest first."""
        return list(self._lines)

    def read(self) -> None:
        """Takes in what is new."""
        found: Sequence[Happening] = ()
        with suppress(StoreError):  # the cluster is gone; the run says so
            events = self._run.events(self._newest)
            self._newest = max((event.id for event in events), default=self._newest)
            found = [Happening(event.time, event.level, event.text) for event in events]
        notes = list(self._run.notes)
        now = time.time() if self._began else None
        noted = [Happening(now, "info", note) for note in notes[self._num_notes :]]
        self._num_notes, self._began = len(notes), True
        for line in (*found, *noted):
            self._add(line)

    def add(self, text: str, level: str = "info") -> None:
        """Notes what was done from here."""
        self._add(Happening(time.time(), level, text))

    def _add(self, line: Happening) -> None:
        self._lines.append(line)
        self.version += 1
