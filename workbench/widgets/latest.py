"""Work beside the user interface, of which only the latest request counts."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """One thread that works on the newest request; those in between are skipped.

    Args:
        work: is called on the thread, and hands on what it found by itself; it must not raise.
        name: of the thread.
        rest: is called on the thread once nothing was asked for `rest_s` seconds after work.
        rest_s: how long that is.
    """

    def __init__(
        self, work: Callable[[T], None], name: str, rest: Callable[[], None], rest_s: float = 1.0
    ) -> None:
        self._work, self._name, self._rest, self._rest_s = work, name, rest, rest_s
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, request: T) -> None:
        """Replaces the request that waits, if there is one; returns at once."""
        with self._changed:
            if self._closed:
                return
            self._waiting[:] = [request]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def superseded(self) -> bool:
        """Whether a newer request waits, so that what is under way is of no use any more."""
        return bool(self._waiting) or self._closed

    def settle(self, timeout: float) -> bool:
        """Waits until there is nothing to do; whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self) -> None:
        """Ends the thread after what it is at."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        worked = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                patience = self._rest_s if worked else None
                called = self._changed.wait_for(self.superseded, patience)
                if self._closed:
                    return
                if called:
                    request, self._busy = self._waiting.pop(), True
            if called:
                self._work(request)
            else:
                self._rest()
            worked = called
