"""The index of a set of pieces: which file holds which span of which tensor, as TOML."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from workbench.model.errors import CheckpointError
from workbench.model.files import replacing

INDEX = "index.toml"
_FORMAT = "workbench pieces 1"


@dataclass(frozen=True)
class Span:
    """Where one part lies: `length` elements of dimension `dim` from `start`, in `file`.

    The file's own tensor of this name has them from `offset` on: it may hold several spans, one
    behind the other. A tensor without dimensions is one span of length 1.
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
        CheckpointError: the pieces leave a hole, overlap, or are cut along different dimensions.
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
        CheckpointError: it could not be written; what was there before is untouched.
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
        CheckpointError: there is none, it is damaged, or its pieces do not cover the tensors.
    """
    try:
        text = _IndexText.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {path.parent} is no set of pieces") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place, given = ".".join(map(str, first["loc"])), repr(first["input"])[:60]
        raise CheckpointError(f"{path}: {place}: {first['msg']} (got {given})") from None
    if text.format != _FORMAT:
        raise CheckpointError(f"{path} has format {text.format!r}; this is {_FORMAT!r}")
    return {name: _entry(path, name, entry) for name, entry in text.tensors.items()}


def _entry(path: Path, name: str, text: _EntryText) -> Entry:
    dtype = getattr(torch, text.dtype, None)
    if not isinstance(dtype, torch.dtype):
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
