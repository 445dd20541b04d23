"""A process that is held, in turns, for a multiple of the processor's time that it takes.

    runs     |====|     |====|     |== waits for others        ==|
    held          |-----|    |-----|                              |--|

Whoever computes twice as long is held twice as long, and who waits is not held at all: what a slow
engine costs the others is its computing, and not that it was stopped when they came.

Source: scaled sleep, E-C in the reference of heterogeneous training; that it acts from outside, by
signals, is ours.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).with_name("throttling.py")


class Throttle:
    """Makes a process so many times slower, until it is told to stop, or this process ends.

    It does so from the moment on at which this returns.

    Args:
        pid: of the process.
        factor: how many times slower it is to be, more than 1.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self.pid, self.factor = pid, factor
        self._lock = threading.Lock()
        self._measured = 1.0
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), str(pid), repr(factor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a notebook's stop button is not meant for it
        )
        self._heard()

    @property
    def measured(self) -> float:
        """How many times slower it has been made: what it ran and was held, over what it ran.

        1 as long as it has not run.
        """
        with self._lock, suppress(OSError, ValueError):  # it has ended
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            ran_s, held_s = map(float, self._heard().split())
            if ran_s > 0:
                self._measured = (ran_s + held_s) / ran_s
        return self._measured

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or it was told to stop."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Lets the process run again."""
        with self._lock, suppress(OSError):
            self._process.communicate()
        send(self.pid, signal.SIGCONT)

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
