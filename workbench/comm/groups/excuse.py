"""A rank that waits for a disk, or for data: the others wait for it as long as it does."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch.distributed.distributed_c10d import Store

RENEW_EVERY_S = 1.0


class Excuse:
    """One rank's: while it is excused for longer, a thread says so, again and again.

    Args:
        store: the store that the ranks of the world share.
        rank: the global rank.
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
                    self._store.add(_place(self._rank), 1)
                self._renew()


def is_renewed(store: Store, ranks: Sequence[int], done: Callable[[], bool]) -> bool:
    """Whether one of some ranks says, now, that it is excused; waits some seconds for that.

    Args:
        store: the store that the ranks of the world share.
        ranks: the global ranks.
        done: a function that returns whether they need not be waited for any more.
    """

    def told() -> list[int]:
        return [store.add(_place(rank), 0) for rank in ranks]

    before, deadline = told(), time.monotonic() + 3 * RENEW_EVERY_S
    if not any(before):  # none has ever been excused
        return False
    while time.monotonic() < deadline:
        if done() or told() != before:
            return True
        time.sleep(RENEW_EVERY_S / 10)
    return False


def _place(rank: int) -> str:
    return f"excused/{rank}"
