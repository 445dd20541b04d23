"""What a process is known by: its identity, the folder that it holds, the relay that stands for it.

An engine on another host is known here by its relay (`hosts.remote`), a process with an id of this
host; what supervisor, job server and engines have to agree on about relays stands here as well.
"""

import fcntl
import os
import platform
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from workbench.store.errors import ClusterError

SUPERVISOR, SERVER, RENDEZVOUS = "supervisor.pid", "server.pid", "rendezvous.pid"
"""The lock files in a cluster's folder."""

CARRIED = "WORKBENCH_CARRIED"
"""The variable that names the variables that a relay hands on to its engine."""
OWN_PID = "WORKBENCH_PID"
"""The variable that tells an engine by which process it is known where the cluster is kept."""

UNREACHED, LOST = 201, 202
ENDINGS = {
    UNREACHED: "could not be started: nothing answers on its host",
    LOST: "was lost: its host does not answer any more",
    os.EX_IOERR: "ended, as it could not write: is the disk of the run's folder full?",
}
"""What an exit status means: a relay's, where it is none of the engine's, and an engine's own."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, known again whatever ran under its id before, here or elsewhere.

    Attributes:
        started: when it began, in clock ticks since its kernel did: no change of the clock moves
            it.
        boot: which start of which kernel, and which of its process namespaces, the id is of: after
            a reboot, and in a container that was started again, ids are other processes'. The
            host's name may change meanwhile.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Returns the process of this kernel that has the id now, or had it and was not collected.

        Raises:
            ProcessLookupError: no process has it.
        """
        if (found := _stat(pid)) is None:
            raise ProcessLookupError(f"no process {pid} on this host")
        return cls(pid, found[1], _boot())

    @classmethod
    def here(cls) -> Self:
        """Returns this process."""
        return cls.of(os.getpid())

    @property
    def is_near(self) -> bool:
        """Whether its id means a process here: it is of this kernel, which still runs."""
        return self.boot == _boot()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs here; of another kernel's process nobody here knows."""
        found = _stat(self.pid) if self.is_near else None
        return found is not None and found[0] not in "ZX" and found[1] == self.started

    def send(self, number: signal.Signals) -> bool:
        """Signals this process, and never another that has its id by now.

        Returns:
            Whether it was there, and is ours to signal.
        """
        opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
        with suppress(ProcessLookupError, PermissionError):
            if opener is None:  # macOS
                is_alive = self.is_alive
                if is_alive:
                    os.kill(self.pid, number)
                return is_alive
            descriptor = opener(self.pid)
            try:
                # Looked at once it is held: from here on, the id cannot become another's.
                if self.is_alive:
                    signal.pidfd_send_signal(descriptor, number)
                    return True
            finally:
                os.close(descriptor)
        return False


@cache
def _boot() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system
        return platform.node()


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns the kernel's letter for a process's state, and when it began; None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return state, int(rest[18])


LEASE_S = 60.0
RENEW_EVERY_S = 5.0


class FolderLock:
    """Holds a folder for this process until it ends, however it ends.

    Args:
        path: the lock file, which names the process; see `holder`.
        what: what this process is, "supervisor".

    Raises:
        ClusterError: another process holds the folder, or the file cannot be locked; the text names
            it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Where locks do not reach other hosts, what they wrote does.
            if (other := holder(path)) is not None and not other.is_near:
                raise BlockingIOError
        except BlockingIOError:
            said = os.pread(self._file, 20, 0).decode(errors="replace").split()
            os.close(self._file)
            raise ClusterError(
                f"{path.parent} has a {what} already, process {said[0] if said else 'unknown'}"
            ) from None
        except OSError as error:
            os.close(self._file)
            raise ClusterError(
                f"{path} cannot be locked ({error.strerror}): a cluster's folder lies on a file "
                "system that has locks, flock(2)"
            ) from error
        here = ProcessIdentity.here()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{here.pid} {here.started} {here.boot}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


def renew(path: Path) -> None:
    """Says that the holder of a folder still runs, to who cannot see its process.

    To be called every `RENEW_EVERY_S` seconds.
    """
    with suppress(OSError):  # a full disk, or the folder is being removed
        os.utime(path)


def holder(path: Path) -> ProcessIdentity | None:
    """Returns the process that holds a folder; None where none does.

    One of another kernel counts as long as it renews what it wrote; `is_near` is false of it.
    """
    with suppress(OSError, ValueError):  # there is no file, or it names nobody
        pid, started, boot = path.read_text().split()
        owner = ProcessIdentity(int(pid), int(started), boot)
        if owner.is_near:
            return owner if owner.is_alive else None
        return owner if abs(time.time() - path.stat().st_mtime) < LEASE_S else None
    return None


def stat_file(folder: Path, pid: int) -> Path:
    """Returns where a relay writes what the kernel of the other host says of its engine."""
    return folder / "relays" / f"{pid}.stat"


def own_pid() -> int:
    """Returns by which process this engine is known where the cluster is kept: perhaps a relay."""
    return int(os.environ.get(OWN_PID, os.getpid()))
