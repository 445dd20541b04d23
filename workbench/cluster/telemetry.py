"""Metric rows on their way from a rank to the notebook: few messages, none lost.

A rank numbers its rows from 0. Rows travel as packed float64 under a key that says the first
one's number, so no message replaces another: ipyparallel keeps the last value of each key.

    rank      emit emit emit | publish {"rows/0": 3 rows} | emit | publish {"rows/3": 1 row} ...
    notebook                        rows 0, 1, 2                          row 3
"""

import struct
import threading
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress

from workbench.plan.metrics import COLUMNS, Row

PERIOD_S = 0.1
LARGEST_MESSAGE_BYTES = 60 << 10  # of a control message's 64 KiB; the rest is for its envelope
_ROW = struct.Struct(f"={len(COLUMNS)}d")
_ROWS_OF_A_MESSAGE = LARGEST_MESSAGE_BYTES // _ROW.size
_ROWS_OF_AN_ANSWER = _ROWS_OF_A_MESSAGE // 4  # the answer itself wants room too
_KEY = "rows/"
_WHOLE = frozenset(("step", "rank", "tensor_bytes", "peak_bytes", "rss_bytes", "gpu_bytes"))


class Telemetry:
    """A rank's end: collects rows, and publishes them from a thread of its own.

    Args:
        publish: sends one message of at most 64 KiB; may fail, then it is tried again.
        period_s: seconds between two messages.
    """

    def __init__(
        self, publish: Callable[[dict[str, bytes]], None], period_s: float = PERIOD_S
    ) -> None:
        self._publish, self._period_s = publish, period_s
        self._waiting: list[bytes] = []
        self._first = 0  # number of the first waiting row
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)
        self._thread.start()

    def emit(self, row: Row) -> None:
        """Takes one row.

        Raises:
            ValueError: a name that is no column, or a column without a value.
        """
        if row.keys() != set(COLUMNS):
            raise ValueError(f"a row has the columns {COLUMNS}, got {tuple(row)}")
        self._waiting.append(_ROW.pack(*(row[name] for name in COLUMNS)))

    def close(self) -> tuple[int, bytes]:
        """Stops publishing; returns what is left, at most 15 KiB: first row's number, and rows."""
        self._closing.set()
        self._thread.join()
        while len(self._waiting) > _ROWS_OF_AN_ANSWER:
            self._send()
        return self._first, b"".join(self._waiting)

    def _serve(self) -> None:
        while not self._closing.wait(self._period_s):
            if self._waiting:
                with suppress(Exception):  # nothing was lost; the next round tries again
                    self._send()

    def _send(self) -> None:
        rows = self._waiting[:_ROWS_OF_A_MESSAGE]
        self._publish({f"{_KEY}{self._first}": b"".join(rows)})
        # Only now: a row that was not sent stays.
        del self._waiting[: len(rows)]
        self._first += len(rows)


class Receiver:
    """The notebook's end for one rank: takes messages in any order, gives rows in theirs.

    Args:
        count: is told the bytes of each message.
    """

    def __init__(self, count: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._count = count
        self._num_rows = 0
        self._early: dict[int, bytes] = {}

    def take(self, published: MutableMapping[str, bytes]) -> list[Row]:
        """The rows that came since the last call; removes their messages from `published`."""
        for key in [key for key in list(published) if key.startswith(_KEY)]:
            packed = published.pop(key)
            self._count(len(packed))
            self._early[int(key.removeprefix(_KEY))] = packed
        return self._in_order()

    def finish(self, first: int, packed: bytes) -> list[Row]:
        """The last rows, which came with the rank's answer."""
        self._early[first] = packed
        return self._in_order()

    @property
    def has_gap(self) -> bool:
        """Whether rows are missing before others that came."""
        return bool(self._early)

    def _in_order(self) -> list[Row]:
        rows: list[Row] = []
        while (packed := self._early.pop(self._num_rows, None)) is not None:
            if not packed:
                break
            rows.extend(_rows(packed))
            self._num_rows += len(packed) // _ROW.size
        return rows


def _rows(packed: bytes) -> Iterable[Row]:
    for values in _ROW.iter_unpack(packed):
        yield {
            name: int(value) if name in _WHOLE else value
            for name, value in zip(COLUMNS, values, strict=True)
        }
