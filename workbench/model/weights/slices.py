"""Weights as slices: a rank reads its own pieces, from whatever pieces there are.

    WeightsFile   one file with whole tensors: initial weights
    PieceSet      a folder with files of pieces, each rank's own, and one index: a checkpoint

A piece is a span of one dimension of a whole tensor, or one of each of its blocks. Any spans of any
dimension can be read from any pieces that cover them, so a plan can load what another plan saved.
"""

from collections.abc import Iterable
from itertools import accumulate, product
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import TensorFile
from workbench.model.weights.pieces import INDEX, Entry, read_index
from workbench.plan.graph.graph import Weight
from workbench.plan.io.errors import unknown
from workbench.plan.placement.placement import Shard


class Reader(Protocol):
    """A source of weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """The rank's piece under `shard`, or the whole tensor, in new memory."""
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
        """The shape of the whole tensor."""
        return self._file.shape(name)

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """The rank's piece under `shard`, or the whole tensor, in new memory."""
        piece = _Wanted(name, self.shape(name), self._file.dtype(name), shard, rank)
        for region, target in piece.parts():
            target.copy_(self._file.view(name, region))
        return piece.tensor


class PieceSet:
    """Tensors in pieces: a folder with an index and the files that it names.

    Raises:
        CheckpointError: the index or a file is missing, damaged or does not match, or the pieces of
            a tensor leave a gap or overlap.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._entries = read_index(self.directory / INDEX)
        self.names = tuple(self._entries)
        files = dict.fromkeys(span.file for entry in self._entries.values() for span in entry.spans)
        self._files = {name: TensorFile(self.directory / name) for name in files}
        for name, entry in self._entries.items():
            for file in dict.fromkeys(span.file for span in entry.spans):
                self._check(name, entry, file)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._entry(name).shape

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """The rank's piece under `shard`, or the whole tensor, in new memory."""
        entry = self._entry(name)
        piece = _Wanted(name, entry.shape, entry.dtype, shard, rank)
        for (wanted, target), span in product(piece.parts(), entry.spans):
            held = _region(entry.shape, span.dim, span.start, span.length)
            common = tuple(_intersection(a, b) for a, b in zip(wanted, held, strict=True))
            if any(part.stop <= part.start for part in common):
                continue
            in_file = _region(entry.shape, span.dim, span.start - span.offset, span.length)
            source = self._files[span.file].view(name, _relative(common, in_file))
            target[_relative(common, wanted)].copy_(source)
        return piece.tensor

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(unknown("tensor", name, self.names, of=str(self.directory)))
        return self._entries[name]

    def _check(self, name: str, entry: Entry, file_name: str) -> None:
        file = self._files[file_name]
        spans = sorted((s for s in entry.spans if s.file == file_name), key=lambda s: s.offset)
        ends = accumulate((span.length for span in spans), initial=0)
        if any(span.offset != end for span, end in zip(spans, ends, strict=False)):
            raise CheckpointError(f"{file.path}: the offsets of {name!r} in the index do not fit")
        whole = _region(entry.shape, spans[0].dim, 0, sum(span.length for span in spans))
        stated = tuple(part.stop - part.start for part in whole)
        found = file.shape(name), file.dtype(name)
        if found != (stated, entry.dtype):
            raise CheckpointError(
                f"{file.path}: {name!r} has shape {found[0]} and type {found[1]}, but the index "
                f"says {stated} and {entry.dtype}"
            )


def expect(reader: Reader, weights: Iterable[Weight], *, of: str) -> None:
    """Checks that a reader has these weights, in these shapes.

    Raises:
        CheckpointError: the reader has another model's weights; the first differences are named.
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


class _Wanted:
    """Memory for a rank's piece under `shard` (None: the whole tensor), to be filled.

    Raises:
        CheckpointError: a tensor of this shape cannot be sharded so.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shard: Shard | None, rank: int
    ) -> None:
        if shard and (shard.dim >= len(shape) or shard.extent != shape[shard.dim]):
            raise CheckpointError(f"{name!r} of shape {shape} cannot be cut as {shard}")
        self.shape, self.shard, self.rank = shape, shard, rank
        held = list(shape)
        if shard is not None:
            held[shard.dim] = shard.length(rank)
        self.tensor = torch.empty(held, dtype=dtype)

    def parts(self) -> list[tuple[tuple[slice, ...], Tensor]]:
        """The region of each block in the whole tensor, and the part of the piece that it fills."""
        if not self.tensor.numel():
            return []
        if self.shard is None:
            return [(_region(self.shape, 0, 0, self.shape[0] if self.shape else 1), self.tensor)]
        dim = self.shard.dim
        targets = self.tensor.chunk(self.shard.blocks, dim)
        spans = self.shard.spans(self.rank)
        return [
            (_region(self.shape, dim, *span), target)
            for span, target in zip(spans, targets, strict=True)
        ]


def _region(shape: tuple[int, ...], dim: int, start: int, length: int) -> tuple[slice, ...]:
    """The region of `length` elements of dimension `dim` from `start` on, whole in the others."""
    region = [slice(0, extent) for extent in shape]
    if shape:
        region[dim] = slice(start, start + length)
    return tuple(region)


def _intersection(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _relative(region: tuple[slice, ...], origin: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(part.start - first.start, part.stop - first.start)
        for part, first in zip(region, origin, strict=True)
    )
