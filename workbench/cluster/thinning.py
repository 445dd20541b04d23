"""Old metric rows take no more room the longer a run is: of older files, some steps' rows are kept.

    rank-0.0.rows  rank-0.1.rows  rank-0.2.rows  |  rank-0.3.rows  rank-0.4.rows  rank-0.rows
    every 4th step's                             |  all

With n older files, one in every 2^k steps is kept, with the least 2^k that is at least n. So all of
them together are no larger than one was, and each is written anew log2(n) times.
"""

import os
import struct
from pathlib import Path

from workbench.cluster.rank_files import RankFiles
from workbench.cluster.rows import ROW_BYTES

_STEP = struct.Struct("=d")  # what a row begins with


def thin(files: RankFiles, num_older: int) -> None:
    """Thins the oldest files of those that were put aside; to be called whenever there is one more.

    Args:
        files: of a rank.
        num_older: how many of its files are thinned, the last one for the first time.

    Raises:
        OSError: the disk is full; every file is as it was, or thinned.
    """
    stride = _stride(num_older)
    first = num_older - 1 if stride == _stride(num_older - 1) else 0
    for number in range(first, num_older):
        _thin(files.aside(number), stride)


def step_of(row: bytes) -> int:
    """The step of a packed row."""
    return int(_STEP.unpack_from(row)[0])


def _stride(num_older: int) -> int:
    return 1 << max(num_older - 1, 0).bit_length()


def _thin(path: Path, stride: int) -> None:
    packed = path.read_bytes()
    rows = (packed[start : start + ROW_BYTES] for start in range(0, len(packed), ROW_BYTES))
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(b"".join(row for row in rows if step_of(row) % stride == 0))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
