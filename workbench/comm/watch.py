"""Waiting that can be interrupted, and that knows at the end who did not come."""

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from workbench.comm.errors import CommTimeout, PeerLost

# A wait sleeps inside torch and wakes the moment the work is done; it comes up this often to
# let Python handle signals (a kernel's interrupt).
TICK = timedelta(milliseconds=50)
# Longer waits are posted for the other ranks to read: rare enough to cost nothing.
POST_AFTER_S = 1.0


class Watch:
    """Waits for the works of one rank, and posts long waits in a store that all ranks can read.

    Args:
        store: shared by the ranks of the world.
        rank: the global rank.
        timeout_s: how long to wait for the other ranks in any one collective.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._store = store
        self._begun: dict[dist.Work, float] = {}  # and when, for those not waited for to the end

    @property
    def unfinished(self) -> bool:
        """Whether a work is still under way."""
        return any(not work.is_completed() for work in self._begun)

    def begin(self, work: dist.Work) -> None:
        """Takes note of a work that somebody is going to wait for."""
        self._begun[work] = time.monotonic()

    def wait(self, work: dist.Work, ranks: tuple[int, ...], collective: str) -> None:
        """Returns when `work` is done.

        Args:
            work: the part of the collective to wait for.
            ranks: the global ranks that take part.
            collective: what is waited for, in the same words on every rank.

        Raises:
            CommTimeout: other ranks did not come; it names them.
            PeerLost: a connection broke.
        """
        posted = self._sleep(work, ranks, collective)
        begun = self._begun.pop(work)
        try:
            work.wait()  # raises what went wrong
        except RuntimeError as error:
            if time.monotonic() - begun > self.timeout_s:  # torch has lost its patience first
                raise self._timeout(ranks, collective) from error
            raise PeerLost(f"rank {self.rank} lost a peer in {collective}: {error}") from error
        if posted:
            self._post("")

    def _sleep(self, work: dist.Work, ranks: tuple[int, ...], collective: str) -> bool:
        """Sleeps until `work` is done, well or not; whether the wait was posted."""
        began, posted = time.monotonic(), False
        while not work.is_completed():
            with suppress(RuntimeError):  # not done within a tick
                work.wait(TICK)
            waited = time.monotonic() - began
            if waited > POST_AFTER_S and not posted:
                self._post(collective)
                posted = True
            if waited > self.timeout_s and not work.is_completed():
                raise self._timeout(ranks, collective)
        return posted

    def _timeout(self, ranks: tuple[int, ...], collective: str) -> CommTimeout:
        places = {rank: self._place(rank) for rank in ranks if rank != self.rank}
        missing = {rank: place for rank, place in places.items() if place != collective}
        named = [f"rank {r}" + (f" (waits in {p})" if p else "") for r, p in missing.items()]
        who = f"did not arrive: {', '.join(named)}" if named else "although all ranks arrived"
        what = f"rank {self.rank} waited over {self.timeout_s:g} s in {collective}"
        return CommTimeout(f"{what}; {who}", tuple(missing))

    def _post(self, collective: str) -> None:
        with suppress(RuntimeError):  # a store that is gone must not hide what else went wrong
            self._store.set(_key(self.rank), collective)

    def _place(self, rank: int) -> str:
        """The collective in which another rank says it has been waiting; empty if none."""
        with suppress(RuntimeError):
            if self._store.check([_key(rank)]):
                return self._store.get(_key(rank)).decode()
        return ""


def _key(rank: int) -> str:
    return f"waits/{rank}"
