"""Time limits of batch systems: before an allocation ends, runs leave a checkpoint."""

import time

from workbench.store.record import Level, State
from workbench.store.store import Store

WORKING: tuple[State, ...] = ("queued", "starting", "running")


class Limit:
    """Pauses what trains, some time before the hosts are taken away.

    Args:
        store: of the cluster.
        ends_at: when they are, in seconds since the epoch; None: never, as far as is known.
        notice_s: how long before that.
    """

    def __init__(self, store: Store, ends_at: float | None, notice_s: float) -> None:
        self._store, self._ends_at, self._notice_s = store, ends_at, notice_s
        self._asked: set[tuple[int, int]] = set()  # jobs, and which attempt was to end
        self._is_told = False

    def announce(self) -> None:
        """Tells people when the hosts are taken away."""
        if self._ends_at is not None:
            self._tell(
                f"the hosts are there until {_clock(self._ends_at)}; runs are paused "
                f"{self._notice_s:g} s before that",
                "info",
            )

    def look(self, now: float) -> None:
        """Does what is due.

        Args:
            now: seconds since the epoch.
        """
        if self._ends_at is None or now < self._ends_at - self._notice_s:
            return
        if not self._is_told:
            self._is_told = True
            self._tell(
                f"the hosts are taken away at {_clock(self._ends_at)}: runs are paused, each with "
                "a checkpoint; cluster.restart() asks for hosts again, and run.resume() goes on",
                "warning",
            )
        for job in self._store.jobs(states=WORKING):
            if job.kind == "train" and not job.wish and (job.id, job.attempt) not in self._asked:
                self._asked.add((job.id, job.attempt))
                self._store.command("pause", job.id)

    def _tell(self, text: str, level: Level) -> None:
        self._store.event(text, kind="limit", level=level)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
