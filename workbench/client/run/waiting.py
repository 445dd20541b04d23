"""Waiting for something that goes on elsewhere, so that an interrupt ends it."""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Self

# Short, because neither a thread nor a kernel's event loop notices an interrupt before its
# current sleep ends.
TICK_S = 0.1
INTERRUPTED = "interrupted; the engines stop after their current step and leave a checkpoint"


class Waiting(ABC):
    """What ends once, and can be waited for; a part of `Run`.

    Attributes:
        error: why it failed, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = threading.Event()

    @abstractmethod
    def stop(self) -> None:
        """Asks it to end."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, in whatever way, and its files are written."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Self:
        """Returns when the run has ended.

        An interrupt (of the kernel, or Ctrl-C) stops the run after its current step.

        Raises:
            TimeoutError: it did not end in time; it goes on.
            RunError: it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._done.wait(TICK_S):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self!r} goes on after {timeout:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise KeyboardInterrupt(INTERRUPTED) from None
        return self._ended()

    def join(self, timeout: float) -> bool:
        """Waits for the run to end, at most so many seconds; whether it did. Raises nothing."""
        return self._done.wait(timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        """As `wait`, while the event loop, and so the widgets of a notebook, go on."""
        return self._wait().__await__()

    async def _wait(self) -> Self:
        try:
            while not self._done.is_set():
                await asyncio.sleep(TICK_S)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.stop()
            if _is_cell():
                raise KeyboardInterrupt(INTERRUPTED) from None
            raise
        return self._ended()

    def _ended(self) -> Self:
        if self.error is not None:
            raise self.error
        return self


def _is_cell() -> bool:
    """Whether the caller was cancelled as a notebook's cell.

    ipykernel turns the interrupt of a cell that awaits into a cancellation. Elsewhere a
    cancellation is just that, and KeyboardInterrupt would end the whole event loop.
    """
    task = asyncio.current_task()
    return task is not None and getattr(task.get_coro(), "__name__", "") == "run_cell_async"
