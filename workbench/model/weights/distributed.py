"""Tensors in the folders of `torch.distributed.checkpoint`, without what might execute.

    .metadata      a pickle: the names, types and sizes of tensors, and where their chunks lie
    __0_0.distcp   chunks, one after another: each is a zip that `torch.save` wrote

Torch unpickles both. Here a pickle is data (`pickled.py`): it is read once and checked, and the
checked values are what is loaded. Only tensors are loaded.
"""

import math
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.model.errors import CheckpointError
from workbench.model.weights.pickled import Name, Record, records, typed
from workbench.plan.reading import bytes_of

METADATA = ".metadata"
MOST_DIMENSIONS = 64
_LIST_BYTES = 1 << 16  # at the end of a zip, where it lists its files: torch's are seven

_OF_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = (
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
_DTYPES = {str(dtype): dtype for dtype in (*_OF_STORAGES.values(), *_UNTYPED)}


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors into an empty folder, as one process."""
    with warnings.catch_warnings():  # that it is one: it is meant
        warnings.simplefilter("ignore")
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor, and which bytes of a file hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first: int
    length: int


@dataclass(frozen=True)
class _Entry:
    """A tensor, which its chunks cover."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def read(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Returns the tensors of a folder whose names are wanted, by name.

    Raises:
        CheckpointError: it is damaged, or not as `torch.distributed.checkpoint.save` writes it.
    """
    with _about(folder / METADATA):
        found = _entries(records(bytes_of(folder / METADATA, ValueError)))
    entries = {name: entry for name, entry in found.items() if wanted(name)}
    with _about(folder):
        files = {chunk.file for entry in entries.values() for chunk in entry.chunks}
        there = sum((folder / file).stat().st_size for file in files)
        needed = sum(math.prod(each.size) * each.dtype.itemsize for each in entries.values())
        if needed > there:
            raise ValueError(f"its tensors have {needed:,} bytes, and its files {there:,}")
        return {name: _whole(entry, folder) for name, entry in entries.items()}


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Names the file in errors; a damaged one may lead to any.

    Raises:
        CheckpointError: something is wrong with it.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{path} cannot be read: {why}") from error


def _entries(metadata: Any) -> dict[str, _Entry]:
    """The tensors in metadata, by name."""
    fields = _state(metadata, "Metadata")
    places: dict[Any, tuple[str, int, int]] = {}
    for index, place in typed(dict, fields["storage_data"]).items():
        key, value = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
        if key.get("offset") is None:  # it is no tensor
            continue
        if value.get("transform_descriptors"):
            raise ValueError("its tensors are compressed: only plain ones are read")
        file = typed(str, value["relative_path"])
        if PurePath(file).name != file:
            raise ValueError(f"it names {file!r}, which is no file beside it")
        where = typed(str, key["fqn"]), _size(key["offset"])
        places[where] = file, _number(value["offset"]), _number(value["length"])
    return {
        typed(str, name): _entry(name, _state(entry, "TensorStorageMetadata"), places)
        for name, entry in typed(dict, fields["state_dict_metadata"]).items()
        if typed(Record, entry).name != "BytesStorageMetadata"
    }


def _entry(name: str, fields: Any, places: Mapping[Any, tuple[str, int, int]]) -> _Entry:
    dtype = typed(Name, _state(fields["properties"], "TensorProperties", tuple)[0]).text
    if dtype not in _DTYPES:
        raise ValueError(f"{name!r} has elements of {dtype}, which is not read")
    size, chunks = _size(fields["size"]), []
    for each in typed(list, fields["chunks"]):
        chunk = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        spans = zip(offsets, sizes, size, strict=True)
        if any(first + count > end for first, count, end in spans):
            raise ValueError(f"{name!r} has a chunk that reaches beyond it")
        if (name, offsets) not in places:
            raise ValueError(f"{name!r} has a chunk at {offsets}, which no file has")
        chunks.append(_Chunk(offsets, sizes, *places[name, offsets]))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"{name!r} has chunks that do not cover it")
    return _Entry(_DTYPES[dtype], size, tuple(chunks))


def _whole(entry: _Entry, folder: Path) -> Tensor:
    """A tensor, from its chunks."""
    whole = torch.zeros(entry.size, dtype=entry.dtype)
    for chunk in (each for each in entry.chunks if math.prod(each.sizes)):
        path = folder / chunk.file
        with _about(path):
            if not path.is_file() or path.stat().st_size < chunk.first + chunk.length:
                raise ValueError("it is no file, or truncated")
            with path.open("rb") as file:
                file.seek(chunk.first)
                archive = _Archive(bytearray(file.read(chunk.length)))
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            place = tuple(slice(first, first + count) for first, count in spans)
            whole[place] = _tensor(archive, entry.dtype, chunk.sizes)
    return whole


def _tensor(archive: "_Archive", dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    """The tensor in what `torch.save` wrote, which is to have this type and size."""
    made = typed(Record, records(bytes(archive.read("data.pkl"))))
    if made.name == "_rebuild_parameter":
        made = typed(Record, made.arguments[0])
    if made.name not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        raise ValueError(f"it holds what {made.name} makes, and no plain tensor")
    storage, first, sizes, strides, _, _, *more = made.arguments
    _, kind, key, *_ = typed(Record, storage).arguments
    there = _OF_STORAGES.get(typed(Name, kind).text)
    if made.name == "_rebuild_tensor_v3":
        there = _DTYPES.get(typed(Name, more.pop(0)).text)
    if (there, _numbers(sizes)) != (dtype, size) or any(more):
        raise ValueError(f"it holds {there} {sizes} {more}, not {dtype} {size}")
    content = archive.read(f"data/{typed(str, key)}")
    last = sum((count - 1) * step for count, step in zip(size, _numbers(strides), strict=True))
    if (_number(first) + last + 1) * dtype.itemsize > len(content):
        raise ValueError("its tensor reaches beyond its bytes")
    values = torch.frombuffer(content, dtype=dtype)
    if archive.byteorder != sys.byteorder:
        values.untyped_storage().byteswap(dtype)
    return values.as_strided(size, strides, first)


class _Archive:
    """A zip of files that are not compressed.

    Args:
        content: its bytes.
    """

    def __init__(self, content: bytearray) -> None:
        self._content, self._skipped = memoryview(content), max(0, len(content) - _LIST_BYTES)
        with ZipFile(BytesIO(self._content[self._skipped :])) as archive:
            self._files = {each.filename.partition("/")[2]: each for each in archive.infolist()}

    @property
    def byteorder(self) -> str:
        """The order of the bytes of a number: "little" or "big"."""
        return bytes(self.read("byteorder")).decode() if "byteorder" in self._files else "little"

    def read(self, name: str) -> memoryview:
        """Returns the bytes of a file in it.

        Raises:
            ValueError: it is not there, or compressed, or beyond the zip.
        """
        entry = self._files.get(name)
        if entry is None or entry.compress_type != ZIP_STORED:
            raise ValueError(f"it has no {name}, or a compressed one")
        head = self._skipped + entry.header_offset
        first = head + 30 + sum(struct.unpack_from("<26x2H", self._content, max(0, head)))
        if not 0 <= head < first + entry.file_size <= len(self._content):
            raise ValueError(f"its {name} does not lie in it")
        return self._content[first : first + entry.file_size]


def _state(value: Any, name: str, kind: type = dict) -> Any:
    """The state of a record of this name."""
    if typed(Record, value).name != name:
        raise ValueError(f"it has a {value.name} in the place of a {name}")
    return typed(kind, value.state)


def _size(value: Any) -> tuple[int, ...]:
    """What a `torch.Size` holds."""
    (numbers,) = typed(Record, value).arguments
    return _numbers(numbers)


def _numbers(value: Any) -> tuple[int, ...]:
    if len(typed(tuple, value)) > MOST_DIMENSIONS:
        raise ValueError(f"it has a tensor of {len(value)} dimensions")
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if not 0 <= typed(int, value) < 2**63:
        raise ValueError("it has a number that is negative, or too large")
    return int(value)
