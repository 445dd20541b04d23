"""The job server's process, started again whenever it ends."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from workbench.cluster.keeper.patience import Patience, Series
from workbench.cluster.keeper.spec import Spec, identity
from workbench.cluster.keeper.starting import LOG
from workbench.cluster.launch import command, guarded
from workbench.cluster.processes import MARK, ending

PATIENCE = Patience(lasting_s=5.0, first_s=0.25, longest_s=10.0)


class ServerProcess:
    """Runs `python -m <spec.server> FOLDER`; runs are not disturbed while there is none.

    Args:
        folder: the cluster's.
        spec: what it is.
    """

    def __init__(self, folder: Path, spec: Spec) -> None:
        self._folder, self._spec = folder, spec
        self._series = Series(PATIENCE)
        self._process: subprocess.Popen[bytes] | None = None
        self._due_at: float | None = 0.0

    def look(self, now: float) -> str:
        """Starts it where it is time to; says how it ended, where it has since the last look.

        Args:
            now: seconds of a monotonic clock.
        """
        said = ""
        if self._process is not None and (code := self._process.poll()) is not None:
            said = f"the job server (process {self._process.pid}) {ending(code)}"
            self._process, self._due_at = None, self._series.ended(now)
        if self._process is None and self._due_at is not None and now >= self._due_at:
            self._series.began(now)
            self._process = self._start()
        return said

    def kill(self) -> None:
        """Ends it, and does not start it again."""
        self._due_at = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / LOG).open("ab") as log:
            return subprocess.Popen(
                command(self._spec.server, str(self._folder)),
                env={**os.environ, **guarded(self._folder), MARK: identity(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # our guard ends its whole group
            )
