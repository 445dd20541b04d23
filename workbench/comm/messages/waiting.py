"""Waiting for other ranks: it can be interrupted, and it knows at the end who did not come.

A rank that waits for a disk, or for data, is waited for as long as it does (`Excuse`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from workbench.comm.messages.errors import CommTimeout, PeerLost

RENEW_EVERY_S = 1.0


class Excuse:
    """One rank's: while it is excused for longer, a thread says so, again and again.

    Args:
        renew: is called besides, for whoever else waits for this rank.
    """

    def __init__(self, store: Store, rank: int, renew: Callable[[], object]) -> None:
        self._store, self._rank, self._renew = store, rank, renew
        self._since: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(self) -> Iterator[None]:
        """For what waits for no other rank: two that wait for each other would do so for ever."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="excuse", daemon=True)
            self._thread.start()
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while not self._closed.wait(RENEW_EVERY_S):
            since = self._since
            if since is not None and time.monotonic() - since > RENEW_EVERY_S:
                with suppress(RuntimeError):  # the store is gone: that is seen elsewhere
                    self._store.add(f"excused/{self._rank}", 1)
                self._renew()


def is_renewed(store: Store, ranks: Sequence[int], done: Callable[[], bool]) -> bool:
    """Whether one of some ranks says, now, that it is excused; waits some seconds for that.

    Args:
        done: a function that returns whether they need not be waited for any more.
    """

    def told() -> list[int]:
        return [store.add(f"excused/{rank}", 0) for rank in ranks]

    before, deadline = told(), time.monotonic() + 3 * RENEW_EVERY_S
    if not any(before):  # none has ever been excused
        return False
    while time.monotonic() < deadline:
        if done() or told() != before:
            return True
        time.sleep(RENEW_EVERY_S / 10)
    return False


# A wait sleeps inside torch and wakes the moment the work is done; it comes up this often to
# let Python handle signals (a kernel's interrupt).
TICK = timedelta(milliseconds=50)
# The same for a rank for whose help with something else the others may be waiting.
RESTLESS = timedelta(milliseconds=1)
# Longer waits are posted for the others to read, and look what others have posted, this often.
LOOK_EVERY_S = 1.0
GIVEN_UP = "given up"


class AsyncWork(Protocol):
    """Something under way, as torch's `Work` is: a collective of torch's, or messages."""

    def is_completed(self) -> bool:
        """Returns whether it is over, for good or ill."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Returns when it is done.

        Raises:
            RuntimeError: it is not done within `timeout`, or a connection broke.
        """
        ...


class PeerWatch:
    """Waits on behalf of one rank, and posts in a store, which all can read, when it is long.

    Args:
        timeout_s: the seconds to wait for the other ranks at any one place.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = store
        self._begun: dict[AsyncWork, float] = {}  # when, for works not yet waited for
        self._tended: list[Callable[[], bool]] = []

    @property
    def unfinished(self) -> list[AsyncWork]:
        """Returns the works that are still under way."""
        return [work for work in list(self._begun) if not work.is_completed()]

    def begin(self, work: AsyncWork) -> None:
        """Takes note of a work that somebody is going to wait for."""
        self._begun[work] = time.monotonic()

    def give_up(self, error: BaseException) -> None:
        """Tells ranks that wait for this one that it does not come; the first to say so counts."""
        said = f"rank {self.rank} gave up after {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # a store that is gone must not hide the error
            self._store.compare_set(GIVEN_UP, "", said)

    def meet(self, occasion: str, note: str) -> list[str]:
        """Waits until all ranks of the world have come to `occasion`, which happens once.

        Args:
            occasion: what the ranks meet for, in the same words on all of them.
            note: what this rank tells the others.

        Returns:
            The note of each rank, in rank order.

        Raises:
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: a rank has given up.
        """
        keys = [f"{occasion}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], note)
        began, pause = time.monotonic(), 0.001
        while not self._store.check(keys):
            self._look(occasion, unless=lambda: self._store.check(keys))
            if time.monotonic() - began > self.timeout_s:
                if self._is_excused(range(self.size), lambda: self._store.check(keys)):
                    began = time.monotonic()
                    continue
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise self._timeout(occasion, {rank: "" for rank in absent})
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [self._store.get(key).decode() for key in keys]

    def wait(self, works: Sequence[AsyncWork], ranks: tuple[int, ...], collective: str) -> None:
        """Returns when all `works` are done.

        Args:
            collective: what is waited for, in the same words on every rank.

        Raises:
            CommTimeout: other ranks did not come; it names them.
            PeerLost: a connection broke, or a rank has given up.
        """

        def waiting() -> list[AsyncWork]:
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
        """Returns when `done` says so.

        Args:
            done: a function that returns whether the wait is over; it may raise what went wrong.
            pause: a function that waits for that, about a tick long; when it returns, Python
                handles signals.
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
                if not self._is_excused(ranks, done):
                    raise self._absence(ranks, collective)
                began, look_after_s = time.monotonic(), LOOK_EVERY_S
                continue
            if waited > look_after_s:
                self._store.set(_place(self.rank), collective)
                self._look(collective, unless=done)
                look_after_s += LOOK_EVERY_S
        if look_after_s > LOOK_EVERY_S:
            self._store.set(_place(self.rank), "")

    def tend(self) -> bool:
        """Advances what needs this rank to go on; returns whether any of it is still under way."""
        self._tended = [task for task in self._tended if not task()]
        return bool(self._tended)

    def also(self, task: Callable[[], bool]) -> None:
        """Has `task` called while this rank waits for anything, until it returns True.

        Another rank may wait for what this one has begun, before it comes to where this one is.

        Args:
            task: a function that does what has become possible; returns whether all is done.
        """
        self.tend()  # so that what is over is forgotten
        self._tended.append(task)

    def said(self) -> str:
        """Returns why a rank has given up; "" if none has."""
        with suppress(RuntimeError):
            if self._store.check([GIVEN_UP]):
                return self._store.get(GIVEN_UP).decode()
        return ""

    def _is_done(self, work: AsyncWork, ranks: tuple[int, ...], collective: str) -> bool:
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

    def _is_excused(self, ranks: Sequence[int], done: Callable[[], bool]) -> bool:
        """Returns whether another rank waits for a disk or for data, and so may come later."""
        others = [rank for rank in ranks if rank != self.rank]
        try:
            return is_renewed(self._store, others, done)
        except RuntimeError:  # whoever hosts the store may be gone as well
            return False

    def _look(self, place: str, unless: Callable[[], bool]) -> None:
        """Raises if a rank has given up, for whoever waits for it waits in vain.

        Args:
            unless: a function that returns whether the wait is over: then the other rank came
                before it gave up.
        """
        if self._store.check([GIVEN_UP]) and not unless():
            said = self._store.get(GIVEN_UP).decode()
            raise PeerLost(f"rank {self.rank} waited for {place}; {said}")

    def _absence(self, ranks: tuple[int, ...], collective: str) -> CommTimeout:
        """Returns the error that names the ranks that do not wait in `collective` as this one."""
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
        """Returns the collective in which another rank says it has been waiting; "" if none."""
        with suppress(RuntimeError):  # whoever hosts the store may be gone as well
            if self._store.check([_place(rank)]):
                return self._store.get(_place(rank)).decode()
        return ""


def _place(rank: int) -> str:
    return f"waits/{rank}"


NO_LIMIT = timedelta(seconds=-1)


class MessageWork:
    """Point-to-point works that are waited for together, as if they were one.

    Torch's own for gloo know that they are done only once somebody has waited for them, without
    a limit: one that runs out breaks the connections. So a thread waits.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    @classmethod
    def broken(cls, works: Sequence[dist.Work], error: RuntimeError) -> Self:
        """Returns works of which the next could not start, since a connection had broken."""
        made = cls(works)
        made._error = error
        made.conclude()
        return made

    def is_completed(self) -> bool:
        """Returns whether all of it is over, for good or ill."""
        return self._done.is_set()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Returns when all has been sent and received; it can be interrupted.

        Raises:
            RuntimeError: it is not done within `timeout`, or a connection broke.
        """
        if not self._done.wait(None if timeout < timedelta(0) else timeout.total_seconds()):
            raise RuntimeError("still under way")
        if self._error is not None:
            raise self._error
        return True

    def see_through(self) -> None:
        """Waits for the works; on a thread that has nothing else to do."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._works.clear()

    def conclude(self) -> None:
        """Tells whoever asks or waits."""
        self._done.set()


class Waiters:
    """Threads that wait for messages: one for each `MessageWork` that is under way at one time.

    Fewer would not do: behind a message that comes late others would wait in vain, and with them
    the ranks whose turn is next.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[MessageWork | None]] = []
        self._closed = False

    def begin(self, works: Sequence[dist.Work]) -> MessageWork:
        """Takes over messages that have just been started; returns them as one work."""
        work = MessageWork(works)
        try:  # and not a look first: several threads may begin
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        queue.put(work)
        return work

    def close(self) -> None:
        """Ends the threads: at once, or when what they wait for is over."""
        self._closed = True
        for queue in self._idle:
            queue.put(None)

    def _serve(self, queue: "SimpleQueue[MessageWork | None]") -> None:
        while (work := queue.get()) is not None:
            work.see_through()
            self._idle.append(queue)
            work.conclude()
            if self._closed:
                return
            del work  # an idle thread keeps nothing alive
