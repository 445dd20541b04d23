"""Holds a process in turns, from a process of its own: `python -P throttling.py PID FACTOR`.

In the notebook's process it would wait for the interpreter's lock while something is imported,
garbage is collected or plans are computed, for a tenth of a second and more; by then the engine
would have run that long, and be held for a multiple of it at once.

    says      a line when it begins; "<ran> <held>", in seconds, for every line that it is told
    ends      when nobody can tell it anything any more, or the process is gone; it then runs

No import but Python's own and psutil, so that it starts quickly.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil

# So much of the processor's time makes a turn: short against a layer, since what is still owed when
# ranks meet makes all of them wait, and long against a signal.
TURN_S = 0.001
LOOK_S = 0.0005
# What is owed after a moment in which this process did not run is forgiven beyond this: one that
# is stopped for long is taken for one that hangs.
MOST_S = 0.25


def throttle(pid: int, factor: float) -> None:
    """Makes a process so many times slower until standard input ends.

    Args:
        factor: how many times slower it is to be, more than 1.

    Raises:
        OSError: the process has ended.
        psutil.NoSuchProcess: the same, elsewhere than on Linux.
    """
    send = _sender(pid)
    before = processor_s(pid)
    ran_s = held_s = forgiven_s = 0.0
    print(flush=True)
    while True:
        # What earlier turns were too long or too short is made up for by this one.
        owed_s = ran_s * (factor - 1) - held_s - forgiven_s
        is_turn = owed_s >= TURN_S * (factor - 1)
        if is_turn:
            forgiven_s += max(0.0, owed_s - MOST_S)
            send(signal.SIGSTOP)
        began = time.monotonic()
        try:
            heard = _heard(min(owed_s, MOST_S) if is_turn else LOOK_S)
        finally:
            if is_turn:
                send(signal.SIGCONT)
                held_s += time.monotonic() - began
        if heard == "":
            return
        ran_s = processor_s(pid) - before
        if heard is not None:
            print(ran_s, held_s, flush=True)


def _sender(pid: int) -> Callable[[signal.Signals], None]:
    """What signals a process, and never another that has its id by then."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:  # macOS
        return partial(os.kill, pid)
    return partial(signal.pidfd_send_signal, opener(pid))


def _heard(within_s: float) -> str | None:
    """A line of standard input, "" at its end; None: nothing was said by then."""
    if not select.select([sys.stdin], [], [], within_s)[0]:
        return None
    return sys.stdin.readline()


def processor_s(pid: int) -> float:
    """Seconds of processors' time that a process has taken, of all its threads.

    Raises:
        OSError: there is no such process.
        psutil.NoSuchProcess: the same, elsewhere than on Linux.
    """
    if sys.platform == "linux":  # clock_getcpuclockid(3), to the nanosecond
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    with suppress(OSError, psutil.Error):
        throttle(int(sys.argv[1]), float(sys.argv[2]))
