"""Waiting for a run, in a thread or in an event loop, so that a person can interrupt it."""

import asyncio
import time
from collections.abc import Callable

# Short, because neither a thread nor a kernel's event loop notices an interrupt before its
# current sleep ends.
TICK_S = 0.1


def block(join: Callable[[float], bool], timeout: float | None) -> bool:
    """Waits in this thread; whether it came in time.

    Args:
        join: waits so many seconds for it; whether it is there.
        timeout: the seconds after which it is given up; None: never.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not join(TICK_S):
        if deadline is not None and time.monotonic() > deadline:
            return False
    return True


async def come(is_there: Callable[[], bool], interrupted: Callable[[], str]) -> None:
    """Waits while the event loop, and so the widgets of a notebook, go on.

    Args:
        is_there: whether it is there.
        interrupted: does what is due when somebody interrupts it; gives the text of the error.

    Raises:
        KeyboardInterrupt: a notebook's cell was interrupted.
    """
    try:
        while not is_there():
            await asyncio.sleep(TICK_S)
    except (asyncio.CancelledError, KeyboardInterrupt):
        text = interrupted()
        if _is_cell():
            raise KeyboardInterrupt(text) from None
        raise


def _is_cell() -> bool:
    """Whether the caller was cancelled as a notebook's cell.

    ipykernel turns the interrupt of a cell that awaits into a cancellation. Elsewhere a
    cancellation is just that, and KeyboardInterrupt would end the whole event loop.
    """
    task = asyncio.current_task()
    return task is not None and getattr(task.get_coro(), "__name__", "") == "run_cell_async"
