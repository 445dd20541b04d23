"""Metric rows on their way from a rank to whoever reads them: a file that grows by whole rows.

    rank       emit emit emit | append 3 rows | emit | append 1 row ...
    rank-0.rows                 rows 0, 1, 2           row 3
    a reader                      rows 0, 1, 2                   row 3

Writing takes a thread of its own, twenty times a second at most. Above 4 MiB the file is put aside,
as `rank-0.0.rows`, `rank-0.1.rows` and so on, and a new one is begun; of the oldest, not all rows
are kept, so that they take no more room the longer a run is:

    rank-0.0.rows  rank-0.1.rows  rank-0.2.rows  |  rank-0.3.rows  rank-0.4.rows  rank-0.rows
    every 4th step's                             |  all

With n older files, one in every 2^k steps is kept, with the least 2^k that is at least n. So all of
them together are no larger than one was, and each is written anew log2(n) times.

A row is packed float64, one value for each column.
"""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.plan.io.files import write_whole
from workbench.store.rank_files import RankFiles

_ROW = struct.Struct(f"={len(COLUMNS)}d")
WHOLE = frozenset(("step", "rank", "tensor_bytes", "peak_bytes", "rss_bytes", "gpu_bytes"))
"""Columns of whole numbers."""
ROW_BYTES = _ROW.size
_STEP = struct.Struct("=d")  # what a row begins with

PERIOD_S = 0.05  # a fifth of what a view may lag behind
PUT_ASIDE_BYTES = 4 << 20
ROWS_AT_ONCE = 4096
KEPT_WHOLE = 2  # files that were put aside


def pack_row(row: Row) -> bytes:
    """Returns one row in `ROW_BYTES`.

    Raises:
        ValueError: a name is no column, or a column has no value.
    """
    if row.keys() != set(COLUMNS):
        raise ValueError(f"a row has the columns {COLUMNS}, got {tuple(row)}")
    return _ROW.pack(*(row[name] for name in COLUMNS))


def unpack_rows(packed: bytes) -> Iterator[Row]:
    """Yields the rows, in their order; counts are whole numbers again."""
    for values in _ROW.iter_unpack(packed):
        yield {
            name: int(value) if name in WHOLE and value == value else value
            for name, value in zip(COLUMNS, values, strict=True)
        }


class Telemetry:
    """A rank's end: collects rows, and appends them from a thread of its own.

    Args:
        period_s: the seconds between two writes.
        put_aside_bytes: the size from which on a file is put aside, in bytes.
        kept_whole: how many of those, the newest ones, keep all their rows.
    """

    def __init__(
        self,
        files: RankFiles,
        *,
        period_s: float = PERIOD_S,
        put_aside_bytes: int = PUT_ASIDE_BYTES,
        kept_whole: int = KEPT_WHOLE,
    ) -> None:
        self._files, self._period_s, self._put_aside_bytes = files, period_s, put_aside_bytes
        self._kept_whole = kept_whole
        self._num_aside = self._num_bytes = self._size = 0  # bytes: of all rows that were emitted
        self._num_written = 0
        self._file: int | None = None
        self._waiting: list[bytes] = []
        self._rest = b""  # of what a full disk took only in part
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)
        self._thread.start()

    def emit(self, row: Row) -> None:
        """Takes one row.

        Raises:
            ValueError: a name is no column, or a column has no value.
        """
        self._waiting.append(pack_row(row))
        self._num_bytes += ROW_BYTES

    def close(self) -> int:
        """Writes what is left; returns how many rows were lost, as the disk is full."""
        self._closing.set()
        self._thread.join()
        with suppress(OSError):
            while self._waiting or self._rest:
                self._write()
        if self._file is not None:
            os.close(self._file)
        return -(-(self._num_bytes - self._num_written) // ROW_BYTES)

    def _serve(self) -> None:
        while not self._closing.wait(self._period_s):
            if self._waiting or self._rest:
                with suppress(OSError):  # nothing was lost; the next round tries again
                    self._write()

    def _write(self) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file, self._size = os.open(self._files.rows, flags, 0o600), 0
        if not self._rest:
            count = len(self._waiting)  # others are appended meanwhile
            self._rest = b"".join(self._waiting[:count])
            del self._waiting[:count]
        written = os.write(self._file, self._rest)
        self._rest, self._size = self._rest[written:], self._size + written
        self._num_written += written
        if self._size >= self._put_aside_bytes and not self._rest:
            os.close(self._file)
            self._file = None
            self._files.rows.rename(self._files.aside(self._num_aside))
            self._num_aside += 1
            if (num_older := self._num_aside - self._kept_whole) > 0:
                thin(self._files, num_older)


class RowReader:
    """A reader of one rank's rows: each once, in their order, while they are being written.

    Where nothing came it costs one look at the file's size. Any number of them may read, in any
    process; rows that are half written wait for their other half.
    """

    def __init__(self, files: RankFiles) -> None:
        self._files, self._newest = files, str(files.rows)  # text: a look shall cost little
        self._number = self._offset = 0  # of the file that is read, and in it
        self._aside = str(files.aside(0))  # where that file goes once it is put aside
        self._last = b""  # row that was given
        self._seen: tuple[int, int, int] | None = None  # what the newest file was when all was read

    def take(self, most: int = ROWS_AT_ONCE) -> bytes:
        """Returns the rows that came since the last call, packed; b"": that is all for now.

        Args:
            most: the rows at once, so that a long history takes little memory; the next call gives
                more.

        Raises:
            OSError: the disk cannot be read now, and there is nothing that was read before.
        """
        taken = list[bytes]()
        try:
            taken.extend(self._parts(most * ROW_BYTES))
        except OSError:
            if not taken:
                raise
        return b"".join(taken)

    def _parts(self, room: int) -> Iterator[bytes]:
        """Yields up to `room` bytes of rows, which count as given."""
        while room:
            stamp = _stamp(self._newest)
            if stamp is not None and stamp == self._seen:
                break  # nor was it put aside
            if _stamp(self._aside) is not None:
                packed = self._read_aside(self._aside, room)
                if not packed:
                    self._number, self._offset, self._seen = self._number + 1, 0, None
                    self._aside = str(self._files.aside(self._number))
            elif stamp is None:
                break
            else:
                packed, inode = self._read(self._newest, room)
                if inode != stamp[0]:  # put aside between the two looks
                    continue
                if len(packed) < room:
                    self._seen = stamp
            room -= len(packed)
            if packed:
                self._offset += len(packed)
                self._last = packed[-ROW_BYTES:]
                yield packed

    def read(self, most: int = ROWS_AT_ONCE) -> list[Row]:
        """Returns what `take` does, unpacked."""
        return list(unpack_rows(self.take(most)))

    def _read_aside(self, path: str, room: int) -> bytes:
        """Returns rows after the last that was read, which may lie elsewhere after thinning."""
        with open(path, "rb", buffering=0) as file:
            if self._offset:
                before = self._offset - ROW_BYTES
                if os.pread(file.fileno(), ROW_BYTES, before) != self._last:
                    packed, last = file.read(), step_of(self._last)
                    starts = range(0, len(packed), ROW_BYTES)
                    later = (at for at in starts if step_of(packed[at : at + ROW_BYTES]) > last)
                    self._offset = next(later, len(packed))
            return os.pread(file.fileno(), room, self._offset)

    def _read(self, path: str, room: int) -> tuple[bytes, int | None]:
        """Returns whole rows from the offset on, and the inode of the file that they are from."""
        try:
            with open(path, "rb", buffering=0) as file:
                packed = os.pread(file.fileno(), room, self._offset)
                inode = os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return b"", None
        return packed[: len(packed) // ROW_BYTES * ROW_BYTES], inode


def newest(path: str | Path, most: int = 1) -> bytes:
    """Returns the last whole rows of a file, packed; b"" where there are none yet.

    Args:
        path: the newest rows of a rank (`RankFiles.rows`).
    """
    try:
        with open(path, "rb", buffering=0) as file:
            whole = os.fstat(file.fileno()).st_size // ROW_BYTES
            count = min(whole, most)
            packed = os.pread(file.fileno(), count * ROW_BYTES, (whole - count) * ROW_BYTES)
    except FileNotFoundError:
        return b""
    return packed[: len(packed) // ROW_BYTES * ROW_BYTES]


class AttemptReader:
    """A reader of the rows of all ranks of one attempt."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.tails = tuple(RowReader(RankFiles(folder, rank)) for rank in range(num_ranks))

    def read(self, most: int = ROWS_AT_ONCE) -> list[Row]:
        """Returns new rows, in each rank's order; `most` of each rank at once.

        Raises:
            OSError: rows of a rank cannot be read now, and no other came.
        """
        rows, error = list[Row](), None
        for tail in self.tails:
            try:
                rows += tail.read(most)
            except OSError as unread:
                error = unread
        if error is not None and not rows:
            raise error
        return rows


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Returns a file's inode, bytes and time: the inode of a thinned one may be used again."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def thin(files: RankFiles, num_older: int) -> None:
    """Thins the oldest files of those that were put aside; to be called whenever there is one more.

    Args:
        num_older: how many of its files are thinned, the last one for the first time.

    Raises:
        OSError: the disk is full; every file is as it was, or thinned.
    """
    stride = _stride(num_older)
    first = num_older - 1 if stride == _stride(num_older - 1) else 0
    for number in range(first, num_older):
        _thin(files.aside(number), stride)


def step_of(row: bytes) -> int:
    """Returns the step of a packed row."""
    return int(_STEP.unpack_from(row)[0])


def _stride(num_older: int) -> int:
    return 1 << max(num_older - 1, 0).bit_length()


def _thin(path: Path, stride: int) -> None:
    packed = path.read_bytes()
    rows = (packed[start : start + ROW_BYTES] for start in range(0, len(packed), ROW_BYTES))
    write_whole(path, b"".join(row for row in rows if step_of(row) % stride == 0))
