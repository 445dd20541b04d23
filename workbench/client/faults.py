"""Faults on purpose: engines that die, stop, or become slow while they work.

A slow engine is stopped and let go on, in turns, for a multiple of the processor's time that it
takes: computing takes longer, and nothing else does. It needs no privileges; to make hosts of
several speeds, whose communication is as slow as their computing, see `Hosts(speeds=...)`.

    runs     |====|     |====|     |== waits for others        ==|
    held          |-----|    |-----|                              |--|

Whoever computes twice as long is held twice as long, and who waits is not held at all: what a slow
engine costs the others is its computing, and not that it was stopped when they came.

Source: scaled sleep, E-C in the reference of heterogeneous training; that it acts from outside, by
signals, is ours.
"""

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workbench.store.errors import ClusterError
from workbench.store.process import ProcessIdentity

SCRIPT = Path(__file__).with_name("throttling.py")


class Throttle:
    """Makes a process so many times slower, until it is told to stop, or this process ends.

    It does so from the moment on at which this returns.

    Args:
        factor: how many times slower it is to be, more than 1.
    """

    def __init__(self, process: ProcessIdentity, factor: float) -> None:
        self.process, self.factor = process, factor
        self._lock = threading.Lock()
        self._measured = 1.0
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), str(process.pid), repr(factor)],
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
        self.process.send(signal.SIGCONT)

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Faults:
    """Engines that can be made to fail, and to be slow, on purpose.

    Args:
        process_of: gives the process of an engine, by its number.
        expect: is told the number of an engine, and whether it is paused on purpose from now on.
        is_relayed: says whether an engine is on another host, and its process here a relay.
    """

    def __init__(
        self,
        process_of: Callable[[int], ProcessIdentity],
        expect: Callable[[int, bool], None],
        is_relayed: Callable[[int], bool] = lambda _engine: False,
    ) -> None:
        self._process_of, self._expect, self._is_relayed = process_of, expect, is_relayed
        self._throttles: dict[int, Throttle] = {}

    def kill(self, engine: int) -> None:
        """Ends an engine at once, as a crash would."""
        self.slow(engine, 1.0)
        self._send(engine, signal.SIGKILL)

    def pause(self, engine: int) -> None:
        """Stops an engine where it stands; it is not taken for one that hangs."""
        self.slow(engine, 1.0)
        self._expect(engine, True)
        # A relay hands this on; SIGSTOP would stop the relay.
        self._send(engine, signal.SIGTSTP if self._is_relayed(engine) else signal.SIGSTOP)

    def unpause(self, engine: int) -> None:
        """Lets a paused engine go on."""
        self._send(engine, signal.SIGCONT)
        self._expect(engine, False)

    def slow(self, engine: int, factor: float) -> None:
        """Makes an engine `factor` times slower than it is by itself; 1: no slower.

        Raises:
            ValueError: the factor is below 1, or no number.
            ClusterError: the engine is on another host.
        """
        if not 1 <= factor < math.inf:
            raise ValueError(f"an engine can be made 1 or more times slower, got {factor!r}")
        if factor > 1 and self._is_relayed(engine):
            raise ClusterError(
                f"engine {engine} is on another host, and only those of this host can be slowed"
            )
        known = self._throttles.pop(engine, None)
        if known is not None:
            known.stop()
        if factor > 1:
            self._throttles[engine] = Throttle(self._process_of(engine), factor)

    @property
    def slowed(self) -> dict[int, float]:
        """By the engines that are slowed: how many times, as measured while they worked."""
        return {engine: throttle.measured for engine, throttle in self._throttles.items()}

    def mend(self) -> None:
        """Lets slow engines be as fast as they are."""
        for engine in list(self._throttles):
            self.slow(engine, 1.0)

    def _send(self, engine: int, number: signal.Signals) -> None:
        if not self._process_of(engine).send(number):
            raise ClusterError(f"engine {engine} has ended; cluster.restart()")
