"""Processes that are watched for their end: the kernel says it, nobody has to ask."""

import os
import select
import time
from collections.abc import Callable

from workbench.hosts.processes import is_alive

ASK_EVERY_S = 0.2


class Watch:
    """Tells which of some processes have ended.

    Each is held by a descriptor of its own, so that another process that is given the same id
    later is never taken for it. Where the kernel has none (macOS), it is asked by id.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._held: dict[int, int] = {}  # process id: descriptor; -1: is asked for by id
        self._process: dict[int, int] = {}
        self._ended: set[int] = set()
        self._asked_at = 0.0

    def add(self, pid: int) -> bool:
        """Watches a process; whether it is there."""
        if pid in self._held or pid in self._ended:
            return pid not in self._ended
        if not is_alive(pid):
            return False
        descriptor = -1
        opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
        if opener is not None:
            try:
                descriptor = opener(pid)
            except ProcessLookupError:
                return False
            except OSError:  # a kernel that is too old
                descriptor = -1
        self._held[pid] = descriptor
        if descriptor >= 0:
            self._process[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
        return True

    def wait(self, seconds: float) -> set[int]:
        """The processes that have ended since they were added; waits for the first new one."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(descriptor)
            pid = self._process.pop(descriptor)
            os.close(descriptor)
            del self._held[pid]
            self._ended.add(pid)
        now = time.monotonic()
        if now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            asked = [pid for pid, descriptor in self._held.items() if descriptor < 0]
            self._ended.update(pid for pid in asked if not is_alive(pid))
        return self._ended
