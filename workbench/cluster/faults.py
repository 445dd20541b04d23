"""Faults on purpose: engines that die, stop, or become slow while they work.

A slow engine is stopped and let go on, in turns, so that of every `PERIOD_S` it runs a part of
1/factor. It slows whatever the engine does, communication included, and needs no privileges; to
make hosts of several speeds that share no turns, see `Hosts(speeds=...)`.

Source: the duty cycle of emulated heterogeneity, E-B in the reference of heterogeneous training.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from workbench.cluster.errors import ClusterError

# Short against a step, long against the scheduler's slice.
PERIOD_S = 0.02
JOIN_WITHIN_S = 1.0


class Throttle:
    """Lets a process run for 1/factor of the time, until it is told to stop.

    Args:
        pid: of the process.
        factor: how many times slower it is to be, more than 1.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self.pid, self.factor = pid, factor
        self._over = threading.Event()
        self._began = time.monotonic()
        self._held_s = 0.0
        self._thread = threading.Thread(target=self._turns, name=f"slow {pid}", daemon=True)
        self._thread.start()

    @property
    def measured(self) -> float:
        """How many times slower it has been made, by the time that it was held."""
        passed = time.monotonic() - self._began
        return passed / max(passed - self._held_s, 1e-9)

    def stop(self) -> None:
        """Lets the process run again."""
        self._over.set()
        self._thread.join(JOIN_WITHIN_S)
        _send(self.pid, signal.SIGCONT)

    def _turns(self) -> None:
        try:
            while not self._over.is_set() and _send(self.pid, signal.SIGSTOP):
                held = time.monotonic()
                # What earlier turns were too long or too short is made up for by this one.
                passed = held - self._began + PERIOD_S
                self._over.wait(max(passed * (1 - 1 / self.factor) - self._held_s, 0.0))
                _send(self.pid, signal.SIGCONT)
                now = time.monotonic()
                self._held_s += now - held
                self._over.wait(max(self._held_s / (self.factor - 1) - self._ran_s(now), 0.0))
        finally:
            _send(self.pid, signal.SIGCONT)

    def _ran_s(self, now: float) -> float:
        return now - self._began - self._held_s


class Faults:
    """Engines that can be made to fail, and to be slow, on purpose.

    Args:
        pid_of: the process of an engine, by its number.
        expect: is told the number of an engine, and whether it stands still on purpose.
    """

    def __init__(self, pid_of: Callable[[int], int], expect: Callable[[int, bool], None]) -> None:
        self._pid_of, self._expect = pid_of, expect
        self._throttles: dict[int, Throttle] = {}

    def kill(self, engine: int) -> None:
        """Ends an engine at once, as a crash would."""
        self.slow(engine, 1.0)
        self._send(engine, signal.SIGKILL)

    def pause(self, engine: int) -> None:
        """Stops an engine where it stands; it is not taken for one that hangs."""
        self.slow(engine, 1.0)
        self._expect(engine, True)
        self._send(engine, signal.SIGSTOP)

    def unpause(self, engine: int) -> None:
        """Lets a paused engine go on."""
        self._send(engine, signal.SIGCONT)
        self._expect(engine, False)

    def slow(self, engine: int, factor: float) -> None:
        """Makes an engine `factor` times slower than it is by itself; 1: no slower.

        Raises:
            ValueError: a factor below 1, or no number.
        """
        if not 1 <= factor < math.inf:
            raise ValueError(f"an engine can be made 1 or more times slower, got {factor!r}")
        known = self._throttles.pop(engine, None)
        if known is not None:
            known.stop()
        if factor > 1:
            self._throttles[engine] = Throttle(self._pid_of(engine), factor)

    @property
    def slowed(self) -> dict[int, float]:
        """By the engines that are slowed: how many times, as measured."""
        return {engine: throttle.measured for engine, throttle in self._throttles.items()}

    def mend(self) -> None:
        """Lets slow engines be as fast as they are."""
        for engine in list(self._throttles):
            self.slow(engine, 1.0)

    def _send(self, engine: int, number: signal.Signals) -> None:
        if not _send(self._pid_of(engine), number):
            raise ClusterError(f"engine {engine} has ended; cluster.restart()")


def _send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
