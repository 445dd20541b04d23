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
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import TORCH_DTYPES
from workbench.model.weights.pickled import Name, Record, records, typed
from workbench.plan.io.files import bytes_of

METADATA = ".metadata"
MOST_DIMENSIONS = 64
_LIST_BYTES = 1 << 16  # at the end of a zip, where it lists its files: torch's are seven

_ELEMENTS = dict(Double="float64", Float="float32", Half="float16", BFloat16="bfloat16")
_ELEMENTS |= dict(Long="int64", Int="int32", Short="int16", Char="int8", Byte="uint8", Bool="bool")
_ELEMENTS |= dict(ComplexFloat="complex64", ComplexDouble="complex128")
_OF_STORAGES = {f"torch.{name}Storage": TORCH_DTYPES[of] for name, of in _ELEMENTS.items()}
_DTYPES = {f"torch.{name}": dtype for name, dtype in TORCH_DTYPES.items()}


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors into an empty folder, as one process."""
    with warnings.catch_warnings():  # that it is one: it is meant
        warnings.simplefilter("ignore")
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


class _Chunk(NamedTuple):
    """A part of a tensor, and which bytes of a file hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first: int
    length: int


class _Entry(NamedTuple):
    """A tensor, which its chunks cover."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[_Chunk]


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
    """Names the file in errors; a damaged one may lead to any."""
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
        if not typed(Record, entry).name.endswith(".BytesStorageMetadata")
    }


def _entry(name: str, fields: Any, places: Mapping[Any, tuple[str, int, int]]) -> _Entry:
    dtype = typed(Name, _state(fields["properties"], "TensorProperties", tuple)[0])
    if dtype not in _DTYPES:
        raise ValueError(f"{name!r} has elements of {dtype}, which is not read")
    size, chunks = _size(fields["size"]), []
    for each in typed(list, fields["chunks"]):
        chunk = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        spans = zip(offsets, sizes, size, strict=True)
        if any(first + count > end for first, count, end in spans):
            raise ValueError(f"{name!r} has a chunk that reaches beyond it")
        chunks.append(_Chunk(offsets, sizes, *places[name, offsets]))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"{name!r} has chunks that do not cover it")
    return _Entry(_DTYPES[dtype], size, chunks)


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
                saved = _files(bytearray(file.read(chunk.length)))
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            place = tuple(slice(first, first + count) for first, count in spans)
            whole[place] = _tensor(saved, entry.dtype, chunk.sizes)
    return whole


def _files(content: bytearray) -> dict[str, memoryview]:
    """The files in a zip by `torch.save`, by their names in its only folder."""
    view, skipped = memoryview(content), max(0, len(content) - _LIST_BYTES)
    found = {}
    with ZipFile(BytesIO(view[skipped:])) as listed:
        for entry in listed.infolist():
            if entry.compress_type != ZIP_STORED:
                raise ValueError(f"its {entry.filename} is compressed")
            head = skipped + entry.header_offset
            first = head + 30 + sum(struct.unpack_from("<26x2H", view, max(0, head)))
            if not 0 <= head < first + entry.file_size <= len(view):
                raise ValueError(f"its {entry.filename} does not lie in it")
            found[entry.filename.partition("/")[2]] = view[first : first + entry.file_size]
    return found


def _tensor(saved: Mapping[str, memoryview], dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    """The tensor in what `torch.save` wrote, which is to have this type and size."""
    made = typed(Record, records(bytes(saved["data.pkl"])))
    if made.name == "torch._utils._rebuild_parameter":
        made = typed(Record, made.arguments[0])
    version = made.name.removeprefix("torch._utils._rebuild_tensor_")
    if version not in ("v2", "v3"):
        raise ValueError(f"it holds what {made.name} makes, and no plain tensor")
    storage, first, sizes, strides, _, _, *more = made.arguments
    _, kind, key, *_ = typed(Record, storage).arguments
    told, known = (more.pop(0), _DTYPES) if version == "v3" else (kind, _OF_STORAGES)
    there = known.get(typed(Name, told)), _numbers(sizes)
    if there != (dtype, size) or any(more):
        raise ValueError(f"it holds {there}, and not {(dtype, size)} as it is")
    content = saved[f"data/{typed(str, key)}"]
    last = sum((count - 1) * step for count, step in zip(size, _numbers(strides), strict=True))
    if (_number(first) + last + 1) * dtype.itemsize > len(content):
        raise ValueError("its tensor reaches beyond its bytes")
    values = torch.frombuffer(content, dtype=dtype)
    if bytes(saved.get("byteorder", b"little")).decode() != sys.byteorder:
        values.untyped_storage().byteswap(dtype)
    return values.as_strided(size, strides, first)


def _state(value: Any, name: str, kind: type = dict) -> Any:
    """The state of a record of this class."""
    if typed(Record, value).name.rpartition(".")[2] != name:
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
