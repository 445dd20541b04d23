"""One supervisor for one folder."""

import fcntl
import os
from pathlib import Path
from typing import Self

from workbench.store.errors import ClusterError
from workbench.store.owner import Owner
from workbench.supervisor.starting import PID


class Hold:
    """Holds a folder for this process, until it ends in whatever way.

    Args:
        folder: the cluster's.

    Raises:
        ClusterError: another supervisor has it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PID
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (os.pread(self._file, 20, 0).decode().split() or ["unknown"])[0]
            os.close(self._file)
            raise ClusterError(f"{folder} has a supervisor already, process {holder}") from error
        here = Owner.here()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{here.pid} {here.started} {here.host}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)
