"""A run as one line of a terminal."""

import math
import sys
import time
from typing import TextIO

from workbench.client.run.run import Run

TICK_S = 0.1
WIDTH = 28
_PLAIN_EVERY = 0.1  # of all steps, where no line can be written over


class Progress:
    """Writes where a run stands, over and over: on a terminal in place, elsewhere line by line.

    Args:
        run: the run.
        stream: where to.
    """

    def __init__(self, run: Run, stream: TextIO | None = None) -> None:
        self.run, self.stream = run, sys.stderr if stream is None else stream
        self._steps: dict[int, int] = {}  # of each rank: those done
        self._read = 0
        self._said: tuple[str, int] | None = None
        self._began: tuple[float, int] | None = None
        self._in_place = self.stream.isatty()
        self._longest = 0

    def follow(self) -> None:
        """Returns when the run has ended; raises nothing of its own."""
        while not self.run.join(TICK_S):
            self.show()
        self.show()
        if self._in_place:
            self.stream.write("\n")

    def show(self) -> None:
        """Writes one line, if there is news."""
        self._take()
        done, steps = self.done, self.run.experiment.steps
        said = (self.run.state, done if self._in_place else int(done / (steps * _PLAIN_EVERY)))
        if said == self._said:
            return
        self._said, text = said, self.line()
        if self._in_place:
            self._longest = max(self._longest, len(text))
            self.stream.write(f"\r{text:<{self._longest}}")
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    @property
    def done(self) -> int:
        """Steps that every rank has reported."""
        complete = len(self._steps) == self.run.experiment.plan.world_size
        return min(self._steps.values()) if complete else 0

    def line(self) -> str:
        """The line."""
        run, done, steps = self.run, self.done, self.run.experiment.steps
        filled = WIDTH * done // max(1, steps)
        told = [f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done} of {steps}", run.state]
        if run.reason:
            told.append(run.reason)
        if self._read:
            last = run.rows[self._read - 1]
            told += [f"loss {last['loss']:.4g}", f"{last['samples_per_s']:.4g} samples/s"]
        if not run.is_done and (left := self._left_s(done)) is not None:
            told.append(f"{left:.0f} s left")
        accuracy = run.evaluation.get("accuracy", math.nan)
        if not math.isnan(accuracy):
            told.append(f"test accuracy {accuracy:.1%}")
        return ", ".join(told)

    def _take(self) -> None:
        rows = self.run.rows[self._read :]
        self._read += len(rows)
        for row in rows:
            self._steps[int(row["rank"])] = int(row["step"]) + 1
        if self._began is None and self.done:
            self._began = (time.monotonic(), self.done)

    def _left_s(self, done: int) -> float | None:
        """Seconds to go, at the speed since we look."""
        if self._began is None or done <= self._began[1]:
            return None
        since, first = self._began
        return (time.monotonic() - since) / (done - first) * (self.run.experiment.steps - done)
