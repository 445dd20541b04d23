"""Weights as slices: a rank reads its own pieces, from whatever pieces there are.

    WeightsFile   one file with whole tensors: initial weights
    PieceSet      a folder with files of pieces, each rank's own, and one index: a checkpoint

A piece is a span of one dimension of a whole tensor. Any span of any dimension can be read
from any pieces that cover it, so that a plan loads what another plan saved.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.files import TensorFile
from workbench.model.index import INDEX, Entry, Span, read_index
from workbench.plan.graph import Weight, unknown
from workbench.plan.placement import Shard


class Reader(Protocol):
    """Where weights come from."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        ...

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Rank's piece under `shard`, or the whole tensor, in memory of its own."""
        ...


class WeightsFile:
    """Whole tensors in one safetensors file, memory-mapped.

    Raises:
        CheckpointError: the file is missing, truncated, or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        self.names = self._file.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._file.shape(name)

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Rank's piece under `shard`, or the whole tensor, in memory of its own."""
        shape = self.shape(name)
        region = _region(name, shape, shard, rank)
        target = _empty(region, self._file.dtype(name))
        return target.copy_(self._file.view(name, region)) if target.numel() else target


class PieceSet:
    """Tensors in pieces: a folder with an index and the files that it names.

    Raises:
        CheckpointError: the index or a file is missing, damaged or does not fit, or the pieces
            of a tensor leave a hole or overlap.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._entries = read_index(self.directory / INDEX)
        self.names = tuple(self._entries)
        files = dict.fromkeys(span.file for entry in self._entries.values() for span in entry.spans)
        self._files = {name: TensorFile(self.directory / name) for name in files}
        for name, entry in self._entries.items():
            for span in entry.spans:
                self._check(name, entry, span)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._entry(name).shape

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Rank's piece under `shard`, or the whole tensor, in memory of its own."""
        entry = self._entry(name)
        wanted = _region(name, entry.shape, shard, rank)
        target = _empty(wanted, entry.dtype)
        if not target.numel():
            return target
        for span in entry.spans:
            held = _span_region(entry.shape, span)
            common = tuple(_intersection(a, b) for a, b in zip(wanted, held, strict=True))
            if any(part.stop <= part.start for part in common):
                continue
            source = self._files[span.file].view(name, _relative(common, held))
            target[_relative(common, wanted)].copy_(source)
        return target

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(unknown("tensor", name, self.names, of=str(self.directory)))
        return self._entries[name]

    def _check(self, name: str, entry: Entry, span: Span) -> None:
        file = self._files[span.file]
        stated = tuple(part.stop - part.start for part in _span_region(entry.shape, span))
        found = file.shape(name), file.dtype(name)
        if found != (stated, entry.dtype):
            raise CheckpointError(
                f"{file.path}: {name!r} has shape {found[0]} and type {found[1]}, but the index "
                f"says {stated} and {entry.dtype}"
            )


def expect(reader: Reader, weights: Iterable[Weight], *, of: str) -> None:
    """Checks that a reader has these weights, in these shapes.

    Args:
        reader: the weights at hand.
        weights: of the model that is to be loaded.
        of: what the reader reads, for the error.

    Raises:
        CheckpointError: it is of another model; the first differences are named.
    """
    wrong = []
    for weight in weights:
        if weight.name not in reader.names:
            wrong.append(unknown("tensor", weight.name, reader.names))
        elif reader.shape(weight.name) != weight.shape:
            shape = reader.shape(weight.name)
            wrong.append(f"{weight.name!r} has shape {shape}, the model's has {weight.shape}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{of} is of another model: {'; '.join(wrong[:3])}{more}")


def _region(name: str, shape: tuple[int, ...], shard: Shard | None, rank: int) -> tuple[slice, ...]:
    whole = [slice(0, length) for length in shape]
    if shard is None:
        return tuple(whole)
    if shard.dim >= len(shape) or shard.extent != shape[shard.dim]:
        raise CheckpointError(f"{name!r} of shape {shape} cannot be cut as {shard}")
    start, length = shard.span(rank)
    whole[shard.dim] = slice(start, start + length)
    return tuple(whole)


def _span_region(shape: tuple[int, ...], span: Span) -> tuple[slice, ...]:
    whole = [slice(0, length) for length in shape]
    if shape:
        whole[span.dim] = slice(span.start, span.start + span.length)
    return tuple(whole)


def _intersection(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _relative(region: tuple[slice, ...], origin: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(part.start - first.start, part.stop - first.start)
        for part, first in zip(region, origin, strict=True)
    )


def _empty(region: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty([part.stop - part.start for part in region], dtype=dtype)
