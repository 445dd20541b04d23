"""A run that had ended when it was looked up, so that many are listed without reading them."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.client.run import waiting
from workbench.client.run.run import Run, State


class PastRun(Run):
    """A run that has ended. Its experiment and its folder are read when they are first needed."""

    def __init__(self, number: int, directory: Path, state: State, read: Callable[[], Run]) -> None:
        # Not `Run.__init__`, which follows the job: the other attributes come from `read`.
        self._number, self.directory, self.state, self._read = number, directory, state, read
        self.reason, self._done = "", threading.Event()
        self._done.set()

    def __getattr__(self, name: str) -> Any:
        """An attribute that is missing, since the run was not read yet."""
        if "rows" in vars(self) or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        run = self._read()
        waiting.follow(run, None, False)  # somebody may have resumed it meanwhile
        vars(self).update(vars(run))
        return getattr(self, name)

    @property
    def id(self) -> int | None:
        """The number of its job."""
        return super().id if "rows" in vars(self) else self._number

    def join(self, timeout: float) -> bool:
        """As `Run.join`; also reads the run, since its cluster asks for this before it ends."""
        with suppress(Exception):  # raised to whoever asks for what cannot be read
            _ = self.rows
        return super().join(timeout)
