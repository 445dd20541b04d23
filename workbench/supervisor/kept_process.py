"""A process that is started again whenever it ends, later and later if it ends soon."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from workbench.hosts.processes import ending


@dataclass(frozen=True)
class RestartPolicy:
    """A rule.

    Attributes:
        lasting_s: seconds after which a start counts as good: after that the next one begins at
            once.
        first_s: the wait after the second one in a row that did not; it doubles each time.
        most: how many in a row are tried; None: any number.
    """

    lasting_s: float
    first_s: float
    longest_s: float
    most: int | None = None

    def wait_s(self, failures: int) -> float | None:
        """Seconds to wait after so many in a row ended early; None: no more are tried."""
        if self.most is not None and failures >= self.most:
            return None
        if failures < 2:
            return 0.0
        return float(min(self.first_s * 2.0 ** (failures - 2), self.longest_s))


class Backoff:
    """Starts of one thing, one after another."""

    def __init__(self, patience: RestartPolicy) -> None:
        self._patience = patience
        self._failures = 0
        self._began_at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it was ever started."""
        return self._began_at is not None

    def began(self, now: float) -> None:
        """It was started; `now` is in seconds of a monotonic clock."""
        self._began_at = now

    def ended(self, now: float, *, had_started: bool = False) -> float | None:
        """It has ended; when to start it again, by the same clock. None: no more.

        Args:
            now: seconds of the same clock.
            had_started: whether it is known to have started well, however soon it ended.
        """
        began_at = now if self._began_at is None else self._began_at
        lasted = had_started or now - began_at >= self._patience.lasting_s
        self._failures = 0 if lasted else self._failures + 1
        wait_s = self._patience.wait_s(self._failures)
        return None if wait_s is None else now + wait_s


PATIENCE = RestartPolicy(lasting_s=5.0, first_s=0.25, longest_s=10.0)


class KeptProcess:
    """One process of the cluster at a time, in place of the one before."""

    def __init__(self, name: str, start: Callable[[], psutil.Process]) -> None:
        self._name, self._start = name, start
        self._series = Backoff(PATIENCE)
        self._process: psutil.Process | None = None
        self._due_at: float | None = 0.0

    def poll(self, now: float) -> str:
        """Starts it where it is time to; says how it ended, where it has since the last look."""
        said = ""
        if self._process is not None:
            with suppress(psutil.TimeoutExpired):
                code = self._process.wait(timeout=0)
                said = f"{self._name} (process {self._process.pid}) {ending(code or 0)}"
                self._process, self._due_at = None, self._series.ended(now)
        if self._process is None and self._due_at is not None and now >= self._due_at:
            self._series.began(now)
            self._process = self._start()
        return said

    def kill(self) -> None:
        """Ends it, and does not start it again."""
        self._due_at = None
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()
            self._process.wait()
            self._process = None
