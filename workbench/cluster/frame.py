"""Rows of metrics as a table."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.plan.metrics import COLUMNS, Row

if TYPE_CHECKING:
    import pandas


class Frame:
    """A table that is made anew only where there are more rows; any thread may ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame: pandas.DataFrame | None = None
        self._num_rows = 0

    def of(self, rows: Sequence[Row]) -> "pandas.DataFrame":
        """One line for each step and rank, sorted; of a step that was run again, the last."""
        import pandas  # only here: engines import this package too, and have no use for it

        with self._lock:
            if self._frame is None or self._num_rows != len(rows):
                frame = pandas.DataFrame(rows, columns=list(COLUMNS))
                frame = frame.drop_duplicates(["step", "rank"], keep="last")
                self._frame = frame.sort_values(["step", "rank"], ignore_index=True)
                self._num_rows = len(rows)
            return self._frame.copy()
