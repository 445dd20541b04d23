"""A set of pieces: each rank writes its own file (`Snapshot`), then one rank the index over all.

A file says for itself, in its header, which spans its tensors are and what their checksums are,
so that the index needs nothing but the files.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.files import TensorFile
from workbench.model.index import INDEX, Entry, Span, write_index

SPANS = "pieces"
CHECKSUMS = "crc32"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: `tensor` is the span of `whole` from `start` along `dim`.

    Where `whole` is several equal blocks along `dim`, it is the spans from `start` on in each of
    them, one behind the other (`Shard.blocks`).

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

    Args:
        directory: where the files are.
        files: their names.

    Raises:
        CheckpointError: a file is damaged or holds no pieces; pieces leave a hole, overlap or
            do not agree on the whole.
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
