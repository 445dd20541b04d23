"""Waiting for other ranks: it can be interrupted, and it knows at the end who did not come."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from workbench.comm.groups.errors import CommTimeout, PeerLost

# A wait sleeps inside torch and wakes the moment the work is done; it comes up this often to
# let Python handle signals (a kernel's interrupt).
TICK = timedelta(milliseconds=50)
# The same for a rank for whose help with something else the others may be waiting.
RESTLESS = timedelta(milliseconds=1)
# Longer waits are posted for the others to read, and look what others have posted, this often.
LOOK_EVERY_S = 1.0
GIVEN_UP = "given up"


class Work(Protocol):
    """What is under way: a collective of torch's, or messages."""

    def is_completed(self) -> bool:
        """Whether it is over, for good or ill."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Returns when it is done.

        Raises:
            RuntimeError: not within `timeout`, or a connection broke.
        """
        ...


class Watch:
    """Waits on behalf of one rank, and posts in a store, which all can read, when it is long.

    Args:
        store: shared by the ranks of the world.
        rank: the global rank.
        size: the number of ranks of the world.
        timeout_s: how long to wait for the other ranks at any one place.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = store
        self._begun: dict[Work, float] = {}  # when, for works not yet waited for
        self._tended: list[Callable[[], bool]] = []

    @property
    def unfinished(self) -> bool:
        """Whether a work is still under way."""
        return any(not work.is_completed() for work in list(self._begun))

    def begin(self, work: Work) -> None:
        """Takes note of a work that somebody is going to wait for."""
        self._begun[work] = time.monotonic()

    def give_up(self, error: BaseException) -> None:
        """Tells ranks that wait for this one that it does not come; the first to say so counts."""
        said = f"rank {self.rank} gave up after {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # a store that is gone must not hide the error
            self._store.compare_set(GIVEN_UP, "", said)

    def meet(self, occasion: str, note: str) -> list[str]:
        """Waits until all ranks of the world have come to `occasion`, which happens once.

        Returns:
            What each rank noted, in rank order.

        Raises:
            CommTimeout: not all ranks came; it names them.
            PeerLost: a rank has given up.
        """
        keys = [f"{occasion}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], note)
        began, pause = time.monotonic(), 0.001
        while not self._store.check(keys):
            self._look(occasion, unless=lambda: self._store.check(keys))
            if time.monotonic() - began > self.timeout_s:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise self._timeout(occasion, {rank: "" for rank in absent})
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [self._store.get(key).decode() for key in keys]

    def wait(self, works: Sequence[Work], ranks: tuple[int, ...], collective: str) -> None:
        """Returns when all `works` are done.

        Args:
            works: parts of one collective.
            ranks: the global ranks that take part.
            collective: what is waited for, in the same words on every rank.

        Raises:
            CommTimeout: other ranks did not come; it names them.
            PeerLost: a connection broke, or a rank has given up.
        """

        def waiting() -> list[Work]:
            return [work for work in works if not self._is_done(work, ranks, collective)]

        def pause() -> None:
            tick = RESTLESS if self.tend() else TICK
            for work in waiting()[:1]:
                with suppress(RuntimeError):  # not done within a tick
                    work.wait(tick)

        self.until(lambda: not waiting(), pause, ranks, collective)

    def until(
        self,
        done: Callable[[], bool],
        pause: Callable[[], None],
        ranks: tuple[int, ...],
        collective: str,
    ) -> None:
        """Returns when `done` says so; `pause` waits for it, about a tick long.

        Args:
            done: whether the wait is over; may raise what went wrong.
            pause: lets Python handle signals when it returns.
            ranks: the global ranks that take part.
            collective: what is waited for, in the same words on every rank.

        Raises:
            CommTimeout: other ranks did not come; it names them.
            PeerLost: a rank has given up.
        """
        began, look_after_s = time.monotonic(), LOOK_EVERY_S
        while not done():
            pause()
            waited = time.monotonic() - began
            if waited > self.timeout_s and not done():
                raise self._absence(ranks, collective)
            if waited > look_after_s:
                self._store.set(_place(self.rank), collective)
                self._look(collective, unless=done)
                look_after_s += LOOK_EVERY_S
        if look_after_s > LOOK_EVERY_S:
            self._store.set(_place(self.rank), "")

    def tend(self) -> bool:
        """Advances what needs this rank to go on; whether any of it is still under way."""
        self._tended = [task for task in self._tended if not task()]
        return bool(self._tended)

    def also(self, task: Callable[[], bool]) -> None:
        """Has `task` called while this rank waits for anything, until it returns True.

        Another rank may wait for what this one has begun, before it comes to where this one is.
        """
        self.tend()  # so that what is over is forgotten
        self._tended.append(task)

    def said(self) -> str:
        """Why a rank has given up; empty if none has."""
        with suppress(RuntimeError):
            if self._store.check([GIVEN_UP]):
                return self._store.get(GIVEN_UP).decode()
        return ""

    def _is_done(self, work: Work, ranks: tuple[int, ...], collective: str) -> bool:
        if not work.is_completed():
            return False
        if work in self._begun:
            begun = self._begun.pop(work)
            try:
                work.wait()  # raises what went wrong
            except RuntimeError as error:
                if time.monotonic() - begun > self.timeout_s:  # torch has lost its patience first
                    raise self._absence(ranks, collective) from error
                why = self.said() or error  # a peer that gave up has said more than torch knows
                raise PeerLost(f"rank {self.rank} lost a peer in {collective}: {why}") from error
        return True

    def _look(self, place: str, unless: Callable[[], bool]) -> None:
        """Raises if a rank has given up, for whoever waits for it waits in vain.

        Args:
            place: what this rank waits for.
            unless: whether the wait is over: then the other rank came before it gave up.
        """
        if self._store.check([GIVEN_UP]) and not unless():
            said = self._store.get(GIVEN_UP).decode()
            raise PeerLost(f"rank {self.rank} waited for {place}; {said}")

    def _absence(self, ranks: tuple[int, ...], collective: str) -> CommTimeout:
        """The error that names the ranks that do not wait in `collective` as this one does."""
        waits = {rank: self._place_of(rank) for rank in ranks if rank != self.rank}
        return self._timeout(collective, {r: at for r, at in waits.items() if at != collective})

    def _timeout(self, place: str, absent: dict[int, str]) -> CommTimeout:
        named = [
            f"rank {rank}" + (f" (waits for {at})" if at else "") for rank, at in absent.items()
        ]
        who = f"did not arrive: {', '.join(named)}" if named else "although all ranks arrived"
        what = f"rank {self.rank} waited over {self.timeout_s:g} s for {place}"
        return CommTimeout(f"{what}; {who}", tuple(absent))

    def _place_of(self, rank: int) -> str:
        """The collective in which another rank says it has been waiting; empty if none."""
        with suppress(RuntimeError):  # whoever hosts the store may be gone as well
            if self._store.check([_place(rank)]):
                return self._store.get(_place(rank)).decode()
        return ""


def _place(rank: int) -> str:
    return f"waits/{rank}"
