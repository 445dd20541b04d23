"""Who is told of a run's rows while it goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from workbench.plan.metrics import Row

Callback = Callable[[list[Row]], None]


class Subscribers:
    """Functions that are called with new rows; from any thread they may come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> Callable[[], None]:
        """Takes a function; gives one that lets go of it."""
        with self._lock:
            self._callbacks.append(callback)
        return partial(self._remove, callback)

    def tell(self, rows: list[Row]) -> Iterator[str]:
        """Calls all of them; says of which it let go, since they raised."""
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback(rows)
            except Exception as error:  # a broken view is no reason to lose a run
                self._remove(callback)
                yield f"a subscriber failed and was dropped: {error!r}"

    def _remove(self, callback: Callback) -> None:
        with self._lock, suppress(ValueError):
            self._callbacks.remove(callback)
