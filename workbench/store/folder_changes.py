"""Folders that are read again once something has come into them."""

import os
import time
from pathlib import Path

DATE_GRAIN_S = 2.0  # the coarsest dates: those of FAT


class FolderChanges:
    """Whether files have come into a folder: one look at its date costs next to nothing.

    A date is as coarse as seconds, and may be of another host's clock: a folder counts as changed
    until its date has been the same for longer than that here.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._date, self._since, self._settled = -1, 0.0, False

    def seen(self) -> bool:
        """Whether the folder is to be read, and may have changed since it was last asked.

        Raises:
            OSError: there is no such folder, or it cannot be looked at.
        """
        date, now = os.stat(self._folder).st_mtime_ns, time.monotonic()
        if date != self._date:
            self._date, self._since, self._settled = date, now, False
        was_settled = self._settled
        self._settled = now - self._since > DATE_GRAIN_S
        return not was_settled
