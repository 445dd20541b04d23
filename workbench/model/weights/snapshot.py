"""Copies of pieces in the layout of their file, to be written while training goes on.

    live tensors     w1 w2 m1 m2 ...          change again from the next step on
    take             [ m1 | m2 | w1 | w2 ]    one copy, in memory that is used again
    write            header with a CRC-32 of each tensor, then that memory, 4 MiB at a time

The format is safetensors: a length, a JSON header, and the bytes.
"""

import json
import mmap
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import DTYPES, replacing
from workbench.model.weights.pieces import CHECKSUMS, SPANS, Piece

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
        """Copies pieces from any device; previous ones are dropped.

        Args:
            pieces: the pieces by the name of the tensor that they are part of. Each element of a
                tensor must be in one piece of one file.
        """
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
