"""An event loop on a thread of its own, for synchronous callers.

A notebook's own loop is busy while a cell runs, so what needs a loop gets this one.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_WITHIN_S = 5.0


class Background:
    """Runs coroutines on a daemon thread until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Interrupting the caller cancels it and waits for its end."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(CANCEL_WITHIN_S)
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if not self.is_current:
                self._thread.join()
