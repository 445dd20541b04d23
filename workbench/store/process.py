"""What a process is known by: its identity, the folder that it holds, the relay that stands for it.

An engine on another host is known here by its relay (`hosts.remote`), a process with an id of this
host; what supervisor, job server and engines have to agree on about relays stands here as well.
"""

import fcntl
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workbench.store.errors import ClusterError

SUPERVISOR, SERVER = "supervisor.pid", "server.pid"
"""The lock files in a cluster's folder."""

CARRIED = "WORKBENCH_CARRIED"
"""The variable that names the variables that a relay hands on to its engine."""
OWN_PID = "WORKBENCH_PID"
"""The variable that tells an engine by which process it is known where the cluster is kept."""

UNREACHED, LOST = 201, 202
ENDINGS = {
    UNREACHED: "could not be started: nothing answers on its host",
    LOST: "was lost: its host does not answer any more",
}
"""What a relay's exit status means where it is none of the engine's."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, known again whatever ran under its id before.

    Attributes:
        pid: the process id.
        started: when it began, in clock ticks since its host did: no change of the clock moves it.
        host: the host's name.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Returns the process of this host that has the id now.

        Raises:
            ProcessLookupError: no process has it.
        """
        ticks = _started(pid)
        if ticks is None:
            raise ProcessLookupError(f"no process {pid} on this host")
        return cls(pid, ticks, platform.node())

    @classmethod
    def here(cls) -> Self:
        """Returns this process."""
        return cls.of(os.getpid())

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a process of another host is taken to, as nobody here knows."""
        return self.host != platform.node() or _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """Returns when a process began; None where there is none, or it waits to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])


class FolderLock:
    """Holds a folder for this process until it ends, however it ends.

    Args:
        path: the lock file, which names the process; see `holder`.
        what: what this process is, "supervisor".

    Raises:
        ClusterError: another process holds the folder; the text names it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = os.pread(self._file, 20, 0).decode(errors="replace").split()
            os.close(self._file)
            raise ClusterError(
                f"{path.parent} has a {what} already, process {said[0] if said else 'unknown'}"
            ) from error
        here = ProcessIdentity.here()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{here.pid} {here.started} {here.host}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


def holder(path: Path) -> ProcessIdentity | None:
    """Returns the process that holds a folder; None where none does.

    Args:
        path: the lock file.
    """
    with suppress(OSError, ValueError):  # there is no file, or it names nobody
        pid, started, host = path.read_text().split()
        owner = ProcessIdentity(int(pid), int(started), host)
        return owner if owner.is_alive else None
    return None


def stat_file(folder: Path, pid: int) -> Path:
    """Returns where a relay writes what the kernel of the other host says of its engine.

    Args:
        folder: the cluster's folder.
        pid: the relay's process id.
    """
    return folder / "relays" / f"{pid}.stat"


def own_pid() -> int:
    """Returns by which process this engine is known where the cluster is kept: perhaps a relay."""
    return int(os.environ.get(OWN_PID, os.getpid()))
