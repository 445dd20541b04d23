"""Which checkpoint a job goes on from, told without loading a tensor."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from workbench.train.checkpoint_names import complete

_INDEX = "index.toml"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100 << 20  # as safetensors has it


@dataclass(frozen=True)
class Found:
    """A checkpoint that is there.

    Attributes:
        path: its folder.
        step: updates that were done before it.
    """

    path: Path
    step: int


def newest_whole(directory: Path) -> tuple[Found | None, list[str]]:
    """The newest checkpoint none of whose files is cut off, and what is wrong with newer ones.

    A checkpoint takes its name when all of it was written; a file that is too short since then
    was lost with its disk, or was cut by somebody.
    """
    there = complete(directory)
    damaged: list[str] = []
    for step in sorted(there, reverse=True):
        try:
            cut = [name for name in _files(there[step]) if not whole(there[step] / name)]
        except (OSError, ValueError, KeyError, TypeError):
            cut = [_INDEX]
        if not cut:
            return Found(there[step], step), damaged
        damaged.append(f"{there[step].name} is passed over: not all of {', '.join(cut)} is there")
    return None, damaged


def _files(folder: Path) -> list[str]:
    tensors = tomllib.loads((folder / _INDEX).read_text(encoding="utf-8"))["tensors"]
    return sorted({piece["file"] for entry in tensors.values() for piece in entry["pieces"]})


def whole(path: Path) -> bool:
    """Whether a safetensors file has all the bytes that its header speaks of."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _LARGEST_HEADER:
                return False
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return path.stat().st_size == _LENGTH_BYTES + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return False
