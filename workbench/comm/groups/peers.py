"""The processes of the other ranks of this host: whether they still run."""

import os
import select
from collections.abc import Mapping
from contextlib import suppress


class Peers:
    """Knows which processes have ended, at once and whoever started them."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._open: dict[int, int] = {}

    def meet(self, pids: Mapping[int, int]) -> None:
        """Gets to know the processes of ranks; those that it knows it knows already.

        Args:
            pids: the process of each global rank that is on this host.
        """
        for rank, pid in pids.items():
            if rank in self._pids:
                continue
            self._pids[rank] = pid
            # Where it cannot be had, as on an old kernel, `has_ended` asks for the process id.
            with suppress(OSError, AttributeError):
                self._open[rank] = os.pidfd_open(pid)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended; a zombie has."""
        if rank in self._open:
            poll = select.poll()
            poll.register(self._open[rank], select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            return True
        return False

    def close(self) -> None:
        """Forgets them."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
