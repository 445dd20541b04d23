"""The processes of the other ranks of this host: whether they still run."""

import os
import select
from collections.abc import Mapping
from contextlib import suppress


class Peers:
    """Knows which processes have ended, at once and whoever started them.

    Args:
        pids: the process of each global rank that is on this host.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._open: dict[int, int] = {}
        for rank, pid in pids.items():
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
