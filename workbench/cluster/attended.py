"""Calls that are attended by whoever made them: rows and answer travel through the controller.

A rank numbers its rows from 0. Rows travel as packed float64 under a key that says the first
one's number, so no message replaces another: ipyparallel keeps the last value of each key.

    rank      emit emit emit | publish {"rows/0": 3 rows} | emit | publish {"rows/3": 1 row} ...
    notebook                        rows 0, 1, 2                          row 3
"""

import gc
import pickle
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from ipyparallel.datapub import publish_data

from workbench.cluster import message, rows
from workbench.cluster.answer import Answer
from workbench.cluster.engine import function_of, signals
from workbench.cluster.errors import ControlMessageTooLarge
from workbench.plan.metrics import Row
from workbench.train.control import Control

PERIOD_S = 0.1
LARGEST_MESSAGE_BYTES = 60 << 10  # of a control message's 64 KiB; the rest is for its envelope
_ROWS_OF_A_MESSAGE = LARGEST_MESSAGE_BYTES // rows.ROW_BYTES
_ROWS_OF_AN_ANSWER = _ROWS_OF_A_MESSAGE // 4  # the answer itself wants room too
_KEY = "rows/"


def perform(task: str, experiment: bytes, keywords: Mapping[str, Any], streams: bool) -> bytes:
    """Calls a function and answers for it, whatever it does.

    Args:
        task: "module:function"; it gets `experiment` and `keywords`.
        experiment: packed by `message.pack`.
        keywords: further arguments.
        streams: whether the function also gets `control`, whose `stop_requested` SIGUSR1
            sets, and `emit`, which takes a row of metrics and has it published.

    Returns:
        As `answered` takes it.
    """
    control = Control()
    telemetry = Telemetry(publish_data) if streams else None
    try:
        with signals(control):
            extra = {} if telemetry is None else {"control": control, "emit": telemetry.emit}
            value = function_of(task)(experiment=message.unpack(experiment), **keywords, **extra)
        answer = Answer("returned", value)
    except BaseException as error:
        answer = Answer.of(error)
    gc.collect()  # the model is full of cycles; the next run wants its memory
    first_row, left = (0, b"") if telemetry is None else telemetry.close()
    try:
        packed = answer.pack()
    except ControlMessageTooLarge as error:
        packed = Answer.of(error).pack()
    return pickle.dumps((packed, first_row, left))


def answered(message: bytes) -> tuple[Answer, int, bytes]:
    """The answer; the number of the first row that was not published, and all of those."""
    packed, first_row, left = pickle.loads(message)
    return Answer.unpack(packed), first_row, left


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
        self._waiting.append(rows.pack(row))

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
        some = self._waiting[:_ROWS_OF_A_MESSAGE]
        self._publish({f"{_KEY}{self._first}": b"".join(some)})
        # Only now: a row that was not sent stays.
        del self._waiting[: len(some)]
        self._first += len(some)


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
        found: list[Row] = []
        while (packed := self._early.pop(self._num_rows, None)) is not None:
            if not packed:
                break
            found.extend(rows.unpack(packed))
            self._num_rows += len(packed) // rows.ROW_BYTES
        return found
