"""Takes the times at which the phases of a collective begin, if somebody wants to know."""

import time
from typing import Protocol

from workbench.plan.phases import Phase, PhaseName


class Mark(Protocol):
    """Hears that a phase begins, and with it that the one before is over."""

    def __call__(self, phase: PhaseName, nbytes: int = 0) -> None: ...


def unheard(phase: PhaseName, nbytes: int = 0) -> None:
    """Nobody wants to know."""


class PhaseLog:
    """The phases of one collective, from the moment at which this is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._name: PhaseName = "copy"
        self._start_s, self._round, self._nbytes = 0.0, 0, 0
        self._phases: list[Phase] = []

    def mark(self, phase: PhaseName, nbytes: int = 0) -> None:
        """Begins a phase; one that goes on is still one."""
        if phase == self._name != "send":
            self._nbytes += nbytes
            return
        self._end()
        self._name, self._nbytes = phase, nbytes
        self._round += phase == "send"

    def close(self) -> tuple[float, tuple[Phase, ...]]:
        """Ends the last phase; returns the seconds of all of them together, and the phases."""
        self._end()
        return self._start_s, tuple(self._phases)

    def _end(self) -> None:
        now = time.perf_counter() - self._began
        if now > self._start_s:
            self._phases.append(
                Phase(self._name, self._round, self._start_s, now - self._start_s, self._nbytes)
            )
        self._start_s = now
