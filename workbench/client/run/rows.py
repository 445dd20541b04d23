"""The metrics of a run as a notebook holds them: packed, and thinned where there are too many."""

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.store.telemetry import WHOLE, pack_row, unpack_rows

if TYPE_CHECKING:
    import pandas

MOST = 250_000
"""Rows that are held of a run, of all its ranks together; each takes 144 bytes."""
AT_ONCE = 4096
_STEP, _ACCURACY = map(COLUMNS.index, ("step", "accuracy"))


class Rows(Sequence[Row]):
    """A row of `COLUMNS` for each step and rank, as they came; any thread may read meanwhile.

    Where there are more than `most`, the newer half stays whole. Of the steps before it every
    second one stays, or every fourth and so on, and those after which the model was evaluated, as
    far as they are few.

    Attributes:
        peaks: the highest `peak_bytes` of each rank's rows, those that are gone included.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values = np.empty((0, len(COLUMNS)))
        self._numbers = np.empty(0, np.int64)  # of arrival
        self._count = self._due = 0
        self.num_arrived, self.stride = 0, 1
        self.peaks: dict[int, float] = {}
        self._newest: dict[int, Row] = {}  # by rank; the one that came last is the last of these
        self._frame: pandas.DataFrame | None = None

    def extend(self, rows: Sequence[Row]) -> None:
        """Takes new rows.

        Raises:
            ValueError: one has other columns than `COLUMNS`.
        """
        packed = np.frombuffer(b"".join(map(pack_row, rows))).reshape(-1, len(COLUMNS))
        with self._lock:
            self._frame = None
            for begin in range(0, len(packed), AT_ONCE):
                self._put(packed[begin : begin + AT_ONCE])
            for row in rows:
                rank = int(row["rank"])
                self.peaks[rank] = max(row["peak_bytes"], self.peaks.get(rank, 0))
                self._newest.pop(rank, None)
                self._newest[rank] = row

    def _put(self, packed: NDArray[np.float64]) -> None:
        count = self._count + len(packed)
        if count > len(self._values):
            room = max(2 * len(self._values), count, AT_ONCE)
            more = room - len(self._values)
            self._values = np.concatenate((self._values, np.empty((more, len(COLUMNS)))))
            self._numbers = np.concatenate((self._numbers, np.empty(more, np.int64)))
        self._values[self._count : count] = packed
        self._numbers[self._count : count] = self.num_arrived + np.arange(len(packed))
        self._count, self.num_arrived = count, self.num_arrived + len(packed)
        if count > self._most and self.num_arrived >= self._due:
            self._thin()

    def _thin(self) -> None:
        steps = self._values[: self._count, _STEP]
        is_new = steps >= np.median(steps)
        is_kept = is_new | ~np.isnan(self._values[: self._count, _ACCURACY])
        if np.count_nonzero(is_kept & ~is_new) > self._most // 8:
            is_kept = is_new
        last = steps.max()
        while np.count_nonzero(found := is_kept | (steps % self.stride == 0)) > 3 * self._most // 4:
            if self.stride > last:
                break
            self.stride *= 2
        count = int(np.count_nonzero(found))
        self._values[:count] = self._values[: self._count][found]
        self._numbers[:count] = self._numbers[: self._count][found]
        self._count, self._due = count, self.num_arrived + self._most // 8

    def since(self, number: int) -> tuple[list[Row], int]:
        """What came after so many rows, as far as it was not thinned; and the number by now."""
        with self._lock:
            begin = int(np.searchsorted(self._numbers[: self._count], number))
            packed = self._values[begin : self._count].tobytes()
            now = self.num_arrived
        return list(unpack_rows(packed)), now

    def newest(self, world_size: int) -> list[Row]:
        """The newest row of each rank, in their order; of the ranks that reported last."""
        with self._lock:
            found = dict(list(self._newest.items())[-world_size:])
        return [found[rank] for rank in sorted(found)]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each step and rank, sorted; of a step that was run again, the last."""
        import pandas  # only here: engines import this package too, and have no use for it

        with self._lock:
            if self._frame is None:
                frame = pandas.DataFrame(self._values[: self._count], columns=list(COLUMNS))
                known = frame.columns[frame.notna().all()]  # other versions had fewer columns
                frame = frame.astype(dict.fromkeys(WHOLE.intersection(known), np.int64))
                frame = frame.drop_duplicates(["step", "rank"], keep="last")
                self._frame = frame.sort_values(["step", "rank"], ignore_index=True)
            return self._frame.copy()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        number = 0
        while True:
            with self._lock:
                numbers = self._numbers[: self._count]
                begin = int(np.searchsorted(numbers, number))
                end = min(begin + AT_ONCE, self._count)
                if begin == end:
                    return
                packed, number = self._values[begin:end].tobytes(), int(numbers[end - 1]) + 1
            yield from unpack_rows(packed)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        with self._lock:
            packed = self._values[: self._count][index].tobytes()
        rows = list(unpack_rows(packed))
        return rows if isinstance(index, slice) else rows[0]
