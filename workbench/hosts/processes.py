"""The operating system's side of a cluster: its processes, found by the mark they carry."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil

MARK = "IPP_CLUSTER_ID"  # ipyparallel puts it into the environment of all that it starts


def members(cluster_id: str) -> Iterator[psutil.Process]:
    """Yields every process of the cluster with this id that still runs, this process aside.

    One that has ended but was not collected by its parent has no environment any more.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # not ours to read, or ended meanwhile
            if process.pid != os.getpid() and process.environ().get(MARK) == cluster_id:
                yield process


def reap(cluster_id: str, *, patience_s: float = 5.0) -> int:
    """Kills every process of the cluster with this id; returns how many there were.

    Goes on until a look finds none, because a process may start another while it is looked for.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience_s
    while (found := list(members(cluster_id))) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
            killed.add(process.pid)
        time.sleep(0.01)
    return len(killed)


def is_alive(pid: int) -> bool:
    """Returns whether a process with this id is there and not waiting to be collected."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ending(code: int | None) -> str:
    """Returns how a process ended, in words, by its exit code; None: it is not known."""
    if code is None:
        return "ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def until(done: Callable[[], bool], seconds: float, tick_s: float) -> bool:
    """Asks again and again; returns whether it was so in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(tick_s)
    return True
