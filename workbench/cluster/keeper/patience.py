"""How soon something that ended is started again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """A rule.

    Attributes:
        lasting_s: one that lived so long had started well: the next one starts at once.
        first_s: the wait after the second one in a row that did not; it doubles each time.
        longest_s: the longest wait.
        most: so many in a row are tried; None: any number.
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


class Series:
    """Starts of one thing, one after another.

    Args:
        patience: the rule.
    """

    def __init__(self, patience: Patience) -> None:
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
            now: seconds of that clock.
            had_started: whether it is known to have started well, however soon it ended.
        """
        began_at = now if self._began_at is None else self._began_at
        lasted = had_started or now - began_at >= self._patience.lasting_s
        self._failures = 0 if lasted else self._failures + 1
        wait_s = self._patience.wait_s(self._failures)
        return None if wait_s is None else now + wait_s
