"""A file of tensors: written whole or not at all, read in slices.

The format is safetensors: a length, a JSON header, and the bytes. Nothing in it can execute.
"""

import errno
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.plan.io import files
from workbench.plan.io.errors import unknown

TORCH_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
"""By their names, as texts have them: a name in a text leads to no other."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """As `files.replacing`, for weights; makes the folder, too.

    Several processes may write the same path at once: each has a file of its own, and the last to
    finish wins.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as part:
            yield part
    except (OSError, SafetensorError) as error:
        space = os.strerror(errno.ENOSPC)
        full = " (the disk is full)" if space in str(error) else ""
        raise CheckpointError(f"{path} could not be written{full}: {error}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file; the same tensors give the same bytes.

    Raises:
        CheckpointError: the file could not be written; an existing one is unchanged.
    """
    packed = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with replacing(path) as part:
        save_file(packed, part, dict(metadata) if metadata else None)


class TensorFile:
    """A memory-mapped safetensors file: only what is read is loaded into memory.

    Raises:
        CheckpointError: the file is missing, truncated, or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = safe_open(str(self.path), framework="np")
            self.names: tuple[str, ...] = tuple(self._file.keys())
            # Mapped by ourselves: as one torch storage the whole file would count as memory that
            # this process allocated. Copy-on-write, since torch wants buffers to be writable.
            with self.path.open("rb") as opened:
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is no whole safetensors file ({error}): it was truncated, "
                "or it is something else"
            ) from error

    @property
    def metadata(self) -> dict[str, str]:
        """The texts in the header."""
        return dict(self._file.metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The type of one tensor's elements."""
        return DTYPES[self._slice(name).get_dtype()]

    def view(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A view of a part of one tensor, in the file's memory: to be copied at once."""
        shape, dtype = self.shape(name), self.dtype(name)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)[region]
        first, count = self._offsets[name], math.prod(shape)
        whole = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=first)
        return whole.view(shape)[region]

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """The offset of each tensor's bytes, after the header's length and the header."""
        behind = 8 + int.from_bytes(self._bytes[:8], "little")
        header = json.loads(self._bytes[8:behind])
        return {name: behind + header[name]["data_offsets"][0] for name in self.names}

    def _slice(self, name: str) -> Any:
        if name not in self.names:
            raise CheckpointError(unknown("tensor", name, self.names, of=str(self.path)))
        return self._file.get_slice(name)
