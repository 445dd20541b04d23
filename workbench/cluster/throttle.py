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
import sys
import threading
import time
from contextlib import suppress

import psutil

# So much of the processor's time makes a turn: short against a layer, since what is still owed when
# ranks meet makes all of them wait, and long against a signal.
TURN_S = 0.001
LOOK_S = 0.0005
JOIN_WITHIN_S = 1.0


class Throttle:
    """Makes a process so many times slower, until it is told to stop.

    Args:
        pid: of the process.
        factor: how many times slower it is to be, more than 1.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self.pid, self.factor = pid, factor
        self._over = threading.Event()
        self._ran_s = self._held_s = 0.0
        self._thread = threading.Thread(target=self._turns, name=f"slow {pid}", daemon=True)
        self._thread.start()

    @property
    def measured(self) -> float:
        """How many times slower it has been made: what it ran and was held, over what it ran.

        1 as long as it has not run.
        """
        ran_s = self._ran_s
        return (ran_s + self._held_s) / ran_s if ran_s else 1.0

    def stop(self) -> None:
        """Lets the process run again."""
        self._over.set()
        self._thread.join(JOIN_WITHIN_S)
        send(self.pid, signal.SIGCONT)

    def _turns(self) -> None:
        try:
            before = processor_s(self.pid)
            while not self._over.wait(LOOK_S):
                self._ran_s = processor_s(self.pid) - before
                # What earlier turns were too long or too short is made up for by this one.
                owed_s = self._ran_s * (self.factor - 1) - self._held_s
                if owed_s < TURN_S * (self.factor - 1):
                    continue
                if not send(self.pid, signal.SIGSTOP):
                    return
                began = time.monotonic()
                self._over.wait(owed_s)
                send(self.pid, signal.SIGCONT)
                self._held_s += time.monotonic() - began
        except (OSError, psutil.Error):
            return  # the process has ended
        finally:
            send(self.pid, signal.SIGCONT)


def processor_s(pid: int) -> float:
    """Seconds of processors' time that a process has taken, of all its threads.

    Raises:
        OSError: there is no such process.
        psutil.NoSuchProcess: the same, elsewhere than on Linux.
    """
    if sys.platform == "linux":  # clock_getcpuclockid(3), to the nanosecond
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
