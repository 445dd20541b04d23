"""Faults on purpose: engines that die, stop, or become slow while they work.

A slow engine is stopped and let go on, in turns (`throttle.py`): what takes processor time
takes longer, and nothing else does. It needs no privileges; to make hosts of several speeds, whose
communication is as slow as their computing, see `Hosts(speeds=...)`.
"""

import math
import signal
from collections.abc import Callable

from workbench.cluster.errors import ClusterError
from workbench.cluster.throttle import Throttle, send


class Faults:
    """Engines that can be made to fail, and to be slow, on purpose.

    Args:
        pid_of: the process of an engine, by its number.
        expect: is told the number of an engine, and whether it stands still on purpose.
        is_relayed: whether an engine is on another host, and its process here a relay.
    """

    def __init__(
        self,
        pid_of: Callable[[int], int],
        expect: Callable[[int, bool], None],
        is_relayed: Callable[[int], bool] = lambda _engine: False,
    ) -> None:
        self._pid_of, self._expect, self._is_relayed = pid_of, expect, is_relayed
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
            ValueError: a factor below 1, or no number.
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
            self._throttles[engine] = Throttle(self._pid_of(engine), factor)

    @property
    def slowed(self) -> dict[int, float]:
        """By the engines that are slowed: how many times, as measured while they worked."""
        return {engine: throttle.measured for engine, throttle in self._throttles.items()}

    def mend(self) -> None:
        """Lets slow engines be as fast as they are."""
        for engine in list(self._throttles):
            self.slow(engine, 1.0)

    def _send(self, engine: int, number: signal.Signals) -> None:
        if not send(self._pid_of(engine), number):
            raise ClusterError(f"engine {engine} has ended; cluster.restart()")
