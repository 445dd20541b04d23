"""Finds ranks that were stopped by a signal, within 1.5 s, and with few looks at each.

    every 0.25 s     the sizes of all ranks' files of rows: who reports works
    every 0.5 s      the kernel's word on those who do not report; at once on who has just ceased to
    every 0.1 s      that on those who are stopped, until they have been so for long enough

So a rank that reports often costs one look at a size, and one that is stopped is found after
0.5 + 0.5 + 0.1 s at the latest, and the time that the server's own turns take. A host that is busy
stops nobody: however slow it is, its processes wait for the processor, which is another state.
"""

from collections.abc import Iterable, Iterator

from workbench.server.attempt import Attempt, Rank
from workbench.server.health.vitals import Vitals
from workbench.server.work import Work

STOPPED_S = 0.5  # one that is stopped for less, or works in between, is slow
SIZES_EVERY_S, STOPPED_EVERY_S = 0.25, 0.1

Place = tuple[Work, Attempt, Rank]


class Standstill:
    """Looks at ranks again and again.

    Args:
        vitals: of their processes.
    """

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._silent: set[int] = set()  # processes that did not report before the last look
        self._stopped: list[Place] = []
        self._turn = 0
        self._sizes_at = self._stopped_at = float("-inf")

    def look(self, running: Iterable[tuple[Work, Attempt]], now: float) -> Iterator[Place]:
        """The ranks that stand still, each again and again until it has ended.

        Args:
            running: what runs.
            now: a monotonic clock's seconds.
        """
        if now - self._sizes_at >= SIZES_EVERY_S:
            self._sizes_at = now
            self._look_at_all([(work, a, rank) for work, a in running for rank in a.ranks], now)
        if self._stopped and now - self._stopped_at >= STOPPED_EVERY_S:
            self._stopped_at = now
            for work, attempt, rank in self._stopped:
                self._vitals.look(rank.pid, now)
                if self._vitals.stopped_s(rank.pid, now) >= STOPPED_S and not rank.has_ended:
                    yield work, attempt, rank

    def _look_at_all(self, places: list[Place], now: float) -> None:
        self._turn += 1
        silent = set()
        for _, _, rank in places:
            if rank.has_ended:
                continue
            if rank.has_reported():
                self._vitals.works(rank.pid)
                continue
            silent.add(rank.pid)
            if rank.pid not in self._silent or (self._turn + rank.number) % 2:
                self._vitals.look(rank.pid, now)
        self._silent = silent
        self._stopped = [
            place
            for place in places
            if place[2].pid in silent and self._vitals.is_stopped(place[2].pid)
        ]
