"""Metric rows as they are stored: packed float64, one row after another."""

import struct
from collections.abc import Iterator

from workbench.plan.metrics import COLUMNS, Row

_ROW = struct.Struct(f"={len(COLUMNS)}d")
_WHOLE = frozenset(("step", "rank", "tensor_bytes", "peak_bytes", "rss_bytes", "gpu_bytes"))
ROW_BYTES = _ROW.size


def pack(row: Row) -> bytes:
    """One row in `ROW_BYTES`.

    Raises:
        ValueError: a name that is no column, or a column without a value.
    """
    if row.keys() != set(COLUMNS):
        raise ValueError(f"a row has the columns {COLUMNS}, got {tuple(row)}")
    return _ROW.pack(*(row[name] for name in COLUMNS))


def unpack(packed: bytes) -> Iterator[Row]:
    """The rows, in their order; counts are whole numbers again."""
    for values in _ROW.iter_unpack(packed):
        yield {
            name: int(value) if name in _WHOLE else value
            for name, value in zip(COLUMNS, values, strict=True)
        }
