"""A set of pieces: each rank writes its own file (`Snapshot`), then one rank the index over all.

The index says which file holds which span of which tensor, as TOML. Each file's header has the
spans of its tensors and their checksums, so the index can be made from the files alone.
"""

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import DTYPES, TORCH_DTYPES, TensorFile, replacing
from workbench.plan.io.files import text_of, toml_of

INDEX = "index.toml"

_FORMAT = "workbench pieces 1"


@dataclass(frozen=True)
class Span:
    """The place of one part: `length` elements of dimension `dim` from `start`, in `file`.

    The file's own tensor of this name has them from `offset` on: it may hold several spans, one
    after the other. A tensor without dimensions is one span of length 1.
    """

    file: str
    dim: int
    start: int
    length: int
    offset: int = 0


@dataclass(frozen=True)
class Entry:
    """One whole tensor and its pieces.

    Raises:
        CheckpointError: the pieces leave a gap, overlap, or are split along different dimensions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        dims = {span.dim for span in self.spans}
        if len(dims) > 1 or not all(dim < max(len(self.shape), 1) for dim in dims):
            raise CheckpointError(
                f"the pieces of {self.name!r} of shape {self.shape} are cut along {sorted(dims)}; "
                "all pieces of a tensor are cut along one of its dimensions"
            )
        extent = 1
        if self.shape:
            extent = self.shape[dims.pop()] if dims else min(self.shape)
        end = 0
        for span in sorted(self.spans, key=lambda span: (span.start, span.length)):
            if span.start != end:
                what = "overlap" if span.start < end else "leave a hole"
                raise CheckpointError(
                    f"the pieces of {self.name!r} {what} at {min(span.start, end)}: "
                    f"{span.file} begins at {span.start}, the one before ends at {end}"
                )
            end += span.length
        if end != extent:
            raise CheckpointError(f"the pieces of {self.name!r} cover {end} of {extent}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SpanText(_Strict):
    file: str
    dim: NonNegativeInt
    start: NonNegativeInt
    length: NonNegativeInt
    offset: NonNegativeInt = 0


class _EntryText(_Strict):
    shape: list[NonNegativeInt]
    dtype: str
    pieces: list[_SpanText]


class _IndexText(_Strict):
    format: str
    tensors: dict[str, _EntryText]


def write_index(path: Path, entries: Iterable[Entry]) -> None:
    """Writes an index, in the order of the entries.

    Raises:
        CheckpointError: the index could not be written; an existing one is unchanged.
    """
    lines = [f"format = {json.dumps(_FORMAT)}", "", "[tensors]"]
    for entry in entries:
        dtype = str(entry.dtype).removeprefix("torch.")
        lines += [
            "",
            f"[tensors.{_quoted(entry.name)}]",
            f"shape = {list(entry.shape)}",
            f"dtype = {_quoted(dtype)}",
            "pieces = [",
            *(
                f"    {{ file = {_quoted(span.file)}, dim = {span.dim}, "
                f"start = {span.start}, length = {span.length}"
                f"{f', offset = {span.offset}' if span.offset else ''} }},"
                for span in entry.spans
            ),
            "]",
        ]
    with replacing(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_index(path: Path) -> Mapping[str, Entry]:
    """The entries of an index, by name.

    Raises:
        CheckpointError: the index is missing or damaged, or its pieces do not cover the tensors.
    """
    try:
        text = _IndexText.model_validate(toml_of(text_of(path, ValueError), ValueError))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {path.parent} is no set of pieces") from None
    except ValidationError as error:
        first = error.errors()[0]
        place, given = ".".join(map(str, first["loc"])), repr(first["input"])[:60]
        raise CheckpointError(f"{path}: {place}: {first['msg']} (got {given})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no TOML: {error}") from error
    if text.format != _FORMAT:
        raise CheckpointError(f"{path} has format {text.format!r}; this is {_FORMAT!r}")
    return {name: _entry(path, name, entry) for name, entry in text.tensors.items()}


def _entry(path: Path, name: str, text: _EntryText) -> Entry:
    if (dtype := TORCH_DTYPES.get(text.dtype)) is None:
        raise CheckpointError(f"{path}: {name!r} has the unknown type {text.dtype!r}")
    for piece in text.pieces:
        if Path(piece.file).name != piece.file:
            raise CheckpointError(f"{path}: {piece.file!r} is not a file beside the index")
    spans = tuple(Span(p.file, p.dim, p.start, p.length, p.offset) for p in text.pieces)
    try:
        return Entry(name, tuple(text.shape), dtype, spans)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


SPANS = "pieces"

CHECKSUMS = "crc32"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: `tensor` is the span of `whole` from `start` along `dim`.

    If `whole` consists of several equal blocks along `dim`, it is the spans from `start` on in each
    of them, one after the other (`Shard.blocks`).

    Raises:
        ValueError: the tensor cannot be that part of such a whole.
    """

    tensor: Tensor
    whole: tuple[int, ...]
    dim: int = 0
    start: int = 0
    blocks: int = 1

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        fits = len(shape) == len(self.whole) and all(
            mine == theirs or dim == self.dim
            for dim, (mine, theirs) in enumerate(zip(shape, self.whole, strict=True))
        )
        held = shape[self.dim] if shape and fits else 1
        extent = self.whole[self.dim] if shape and fits else 1
        blocky = held % self.blocks == 0 == extent % self.blocks
        inside = self.start + held // self.blocks <= extent // self.blocks
        if not fits or not blocky or not inside or self.start < 0:
            of = f" of each of {self.blocks} blocks" if self.blocks > 1 else ""
            raise ValueError(
                f"a tensor of shape {shape} is no part of {self.whole} "
                f"from {self.start}{of} along dimension {self.dim}"
            )

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, length) along `dim` of the whole, in the order in which `tensor` has them."""
        if not self.whole:
            return ((0, 1),)
        block, length = (t[self.dim] // self.blocks for t in (self.whole, self.tensor.shape))
        return tuple((self.start + index * block, length) for index in range(self.blocks))


def index_pieces(directory: Path, files: Iterable[str]) -> None:
    """Writes the index over files of pieces, after which `PieceSet(directory)` reads them.

    Raises:
        CheckpointError: a file is damaged or contains no pieces; pieces leave a gap, overlap or
            disagree on the whole.
    """
    wholes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    spans: dict[str, list[Span]] = {}
    for file_name in files:
        file = TensorFile(directory / file_name)
        if SPANS not in file.metadata:
            raise CheckpointError(f"{file.path} holds whole tensors, not pieces")
        for name, (whole, dim, *bounds) in json.loads(file.metadata[SPANS]).items():
            described = tuple(whole), file.dtype(name)
            known = wholes.setdefault(name, described)
            if known != described:
                raise CheckpointError(
                    f"{file.path} has {name!r} as part of {described[0]} {described[1]}, "
                    f"{spans[name][0].file} as part of {known[0]} {known[1]}"
                )
            offset = 0
            for start, length in zip(bounds[::2], bounds[1::2], strict=True):
                spans.setdefault(name, []).append(Span(file_name, dim, start, length, offset))
                offset += length
    write_index(
        directory / INDEX,
        [Entry(name, *whole, tuple(spans[name])) for name, whole in wholes.items()],
    )


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 4 << 20
_ALIGNED_BYTES = 8


@dataclass(frozen=True)
class _Room:
    """The place of a tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def told(self) -> dict[str, object]:
        return {
            "dtype": self.dtype,
            "shape": self.shape,
            "data_offsets": (self.start, self.end),
        }


class Snapshot:
    """One rank's pieces at one moment.

    Its memory belongs to no tensor: a meter of tensors does not count it.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._rooms: dict[str, _Room] = {}
        self._spans: dict[str, list[object]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors that it holds now."""
        return self._size

    @torch.no_grad()
    def take(self, pieces: Mapping[str, Piece]) -> None:
        """Copies pieces from any device; previous ones are dropped."""
        # The widest first, as in safetensors: so each is aligned for its type.
        order = sorted(pieces, key=lambda name: (-pieces[name].tensor.itemsize, name))
        self._rooms, self._spans, offset = {}, {}, 0
        for name in order:
            piece, tensor = pieces[name], pieces[name].tensor
            end = offset + tensor.nbytes
            self._rooms[name] = _Room(_NAMES[tensor.dtype], tuple(tensor.shape), offset, end)
            self._spans[name] = [list(piece.whole), piece.dim, *chain.from_iterable(piece.spans)]
            offset = end
        self._hold(offset)
        for name, room in self._rooms.items():
            tensor = pieces[name].tensor
            if tensor.numel():
                assert self._memory is not None
                copy = torch.frombuffer(
                    self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=room.start
                )
                copy.view(tensor.shape).copy_(tensor)

    def write(self, path: Path, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Writes the file, whole or not at all; the same pieces give the same bytes.

        Args:
            path: the path of a safetensors file, beside those of the other ranks.
            is_wanted: a function that is called repeatedly; once it returns False, the file is
                abandoned.

        Raises:
            CheckpointError: the file could not be written, or is not wanted any more; an existing
                one is unchanged.
        """
        with memoryview(self._memory or b"") as memory, replacing(path) as part:
            header = self._header(memory)
            with part.open("wb", buffering=0) as file:
                _write(file.fileno(), memoryview(len(header).to_bytes(8, "little") + header))
                for start in range(0, self._size, _CHUNK_BYTES):
                    if not is_wanted():
                        raise CheckpointError(f"{path} was given up")
                    with memory[start : min(start + _CHUNK_BYTES, self._size)] as chunk:
                        _write(file.fileno(), chunk)
                os.fsync(file.fileno())  # which may take longest of all
            if not is_wanted():
                raise CheckpointError(f"{path} was given up")

    def _hold(self, size: int) -> None:
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(-1, max(size, 1))
        self._size = size

    def _header(self, memory: memoryview) -> bytes:
        checksums = {}
        for name, room in self._rooms.items():
            with memory[room.start : room.end] as own:
                checksums[name] = zlib.crc32(own)
        metadata = {SPANS: json.dumps(self._spans), CHECKSUMS: json.dumps(checksums)}
        told = {name: room.told() for name, room in self._rooms.items()}
        header = json.dumps({"__metadata__": metadata, **told}).encode()
        return header + b" " * (-len(header) % _ALIGNED_BYTES)


def _write(descriptor: int, packed: memoryview) -> None:
    while packed:
        packed = packed[os.write(descriptor, packed) :]
