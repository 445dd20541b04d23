"""One server on one folder."""

import fcntl
import os
from pathlib import Path
from typing import Self

from workbench.store.errors import ClusterError

LOCK = "server.lock"


class ServerLock:
    """Holds a folder for this process until it ends, however it ends.

    The kernel lets go of the lock with the process, so that none is ever left behind.

    Args:
        folder: the cluster's.

    Raises:
        ClusterError: another server has it; the text names its process.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise ClusterError(
                f"{folder} has a job server already (pid {holder or 'not written yet'}); "
                "two of them would start jobs twice"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
