"""Waiting for a run, in a thread or in an event loop, so that a person can interrupt it."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol, Self

from workbench.client.run.view import ShownRun, made

# Short, because neither a thread nor a kernel's event loop notices an interrupt before its
# current sleep ends.
TICK_S = 0.1
INTERRUPTED = "interrupted; the engines stop after their current step and leave a checkpoint"
LEFT = "interrupted; the run goes on"


class Waited(ShownRun, Protocol):
    """A run, as far as it is waited for; see `Run`."""

    def join(self, timeout: float) -> bool:
        """Waits for its end, at most so many seconds; whether it came."""

    def stop(self) -> None:
        """Asks all ranks to stop after their current step."""


def end(run: Waited, timeout: float | None, progress: bool | None) -> None:
    """Waits in this thread for a run's end; an interrupt stops it.

    Raises:
        TimeoutError: it did not end in time; it goes on.
        KeyboardInterrupt: somebody interrupted it.
    """
    try:
        if not follow(run, timeout, progress):
            raise TimeoutError(f"{run!r} goes on after {timeout:g} s")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(interrupt(run)) from None


def interrupt(run: Waited) -> str:
    """Stops a run, for which somebody does not wait any more; the text of the error."""
    run.stop()
    return INTERRUPTED


def follow(run: Waited, timeout: float | None, progress: bool | None) -> bool:
    """Waits in this thread for a run's end; whether it came in time.

    Args:
        timeout: the seconds after which it is given up; None: never.
        progress: whether to show a bar; None: where there is somebody to see it.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    is_shown = _is_watched() if progress is None else progress
    with Bar(run) if is_shown else nullcontext() as bar:
        while not run.join(TICK_S):
            if bar is not None:
                bar.update()
            if deadline is not None and time.monotonic() > deadline:
                return False
    return True


async def reach(run: Waited, step: int) -> bool:
    """Waits until all ranks have made so many steps; whether they did before the run's end.

    Raises:
        ValueError: the run's experiment has no such step.
    """
    steps = run.experiment.steps
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= steps:
        raise ValueError(f"step is a number from 1 to the {steps} of this run, got {step!r}")
    await come(lambda: run.is_done or made(run) >= step, lambda: LEFT)
    return made(run) >= step


class Bar:
    """The steps of a run as a progress bar, with its state, and the loss beside it."""

    def __init__(self, run: Waited) -> None:
        from tqdm.auto import tqdm  # a widget in a notebook; it looks for one when it is imported

        self._run, done = run, made(run)
        self._bar = tqdm(total=run.experiment.steps, initial=done, unit="step", desc=run.state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._bar.close()

    def update(self) -> None:
        """Shows where the run stands."""
        run, bar = self._run, self._bar
        bar.update(made(run) - bar.n)
        bar.set_description(f"{run.state}: {run.reason}" if run.reason else run.state)
        if rows := run.rows.newest(1):
            bar.set_postfix_str(f"loss {rows[0]['loss']:.4g}")


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


def _is_watched() -> bool:
    """Whether this is a notebook, or writes to a terminal."""
    # Not imported: where it is not loaded yet, this is no notebook.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel") or sys.stderr.isatty()
