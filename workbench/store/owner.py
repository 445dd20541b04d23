"""The process for which something is done: known again, whatever ran under its id before."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        pid: its id.
        started: when it began, in clock ticks since its host did: no change of the clock moves it.
        host: the host's name.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process of this host that has the id now.

        Raises:
            ProcessLookupError: none has.
        """
        ticks = _started(pid)
        if ticks is None:
            raise ProcessLookupError(f"no process {pid} on this host")
        return cls(pid, ticks, platform.node())

    @classmethod
    def here(cls) -> Self:
        """This process."""
        return cls.of(os.getpid())

    @property
    def is_alive(self) -> bool:
        """Whether it still runs. Of another host's nobody here knows, so they are said to."""
        return self.host != platform.node() or _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """When a process began; None where there is none, or one that only waits to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])
