"""Writing a set of pieces: each rank its own file, then one rank the index over all.

A file says for itself which spans its tensors are (in its header), so that the index needs
nothing but the files.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.files import TensorFile, write_tensors
from workbench.model.index import INDEX, Entry, Span, write_index

_SPANS = "pieces"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: `tensor` is the span of `whole` from `start` along `dim`.

    Raises:
        ValueError: the tensor cannot be that part of such a whole.
    """

    tensor: Tensor
    whole: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        fits = len(shape) == len(self.whole) and all(
            mine == theirs or dim == self.dim
            for dim, (mine, theirs) in enumerate(zip(shape, self.whole, strict=True))
        )
        inside = not self.whole or self.start + self.length <= self.whole[self.dim]
        if not fits or not inside or self.start < 0:
            raise ValueError(
                f"a tensor of shape {shape} is no part of {self.whole} "
                f"from {self.start} along dimension {self.dim}"
            )

    @property
    def length(self) -> int:
        """Elements of dimension `dim`."""
        return self.tensor.shape[self.dim] if self.whole else 1


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Writes one rank's pieces, whole or not at all.

    Args:
        path: a safetensors file, beside those of the other ranks.
        pieces: by name of the tensor that they are part of. Each element of a tensor is to be
            in one piece of one file.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched.
    """
    spans = {name: [list(p.whole), p.dim, p.start, p.length] for name, p in pieces.items()}
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    write_tensors(path, tensors, {_SPANS: json.dumps(spans)})


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
        if _SPANS not in file.metadata:
            raise CheckpointError(f"{file.path} holds whole tensors, not pieces")
        for name, (whole, dim, start, length) in json.loads(file.metadata[_SPANS]).items():
            described = tuple(whole), file.dtype(name)
            known = wholes.setdefault(name, described)
            if known != described:
                raise CheckpointError(
                    f"{file.path} has {name!r} as part of {described[0]} {described[1]}, "
                    f"{spans[name][0].file} as part of {known[0]} {known[1]}"
                )
            spans.setdefault(name, []).append(Span(file_name, dim, start, length))
    write_index(
        directory / INDEX,
        [Entry(name, *whole, tuple(spans[name])) for name, whole in wholes.items()],
    )
