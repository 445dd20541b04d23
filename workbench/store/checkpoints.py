"""Which checkpoint a job goes on from, told without loading a tensor.

Where the checkpoints of a run are; for processes, too, that load no tensors and no torch.
"""

import json
import re
import tomllib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

META = "checkpoint.toml"
_NAME = re.compile(r"step-(\d{6,})")


def place(directory: Path, step: int) -> Path:
    """Where the checkpoint of this step is, once it is complete."""
    return directory / f"step-{step:06d}"


def complete(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step; those under way or given up have other names."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in sorted(directory.iterdir()))
    return {int(name[1]): path for name, path in named if name and (path / META).is_file()}


_INDEX = "index.toml"
_LENGTH_BYTES = 8
CHECKSUMS = "crc32"  # in a header: of each tensor, as `model.snapshot` writes it
_CHUNK_BYTES = 1 << 20
_AT_ONCE = 4  # files
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


Newest = tuple[Found | None, list[str]]
"""The newest checkpoint that is whole, and what is wrong with newer ones."""


def newest_whole(directory: Path, *, checked: bool = True) -> Newest:
    """The newest checkpoint all of whose files are whole, and what is wrong with newer ones.

    A checkpoint takes its name when all of it was written; a file that is too short since then,
    or whose bytes have other checksums, was damaged on its disk, or by somebody.

    Args:
        directory: of the run.
        checked: whether to read the files, for their checksums; else their lengths are enough.
    """
    there = complete(directory)
    damaged: list[str] = []
    for step in sorted(there, reverse=True):
        bad = damaged_files(there[step], checked=checked)
        if not bad:
            return Found(there[step], step), damaged
        damaged.append(f"{there[step].name} is passed over: {', '.join(bad)} damaged or cut off")
    return None, damaged


def damaged_files(folder: Path, *, checked: bool = True) -> list[str]:
    """Files of a checkpoint that are not as they were written; see `newest_whole`."""
    try:
        tensors = tomllib.loads((folder / _INDEX).read_text(encoding="utf-8"))["tensors"]
        names = sorted({piece["file"] for entry in tensors.values() for piece in entry["pieces"]})
    except (OSError, ValueError, KeyError, TypeError):
        return [_INDEX]
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # checksums take no interpreter's lock
        found = threads.map(lambda name: whole(folder / name, checked=checked), names)
        return [name for name, is_whole in zip(names, found, strict=True) if not is_whole]


def whole(path: Path, *, checked: bool = True) -> bool:
    """Whether a safetensors file has all the bytes that its header speaks of.

    Args:
        path: of the file.
        checked: whether each tensor's CRC-32, where the header tells it, is compared too.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _LARGEST_HEADER:
                return False
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            spans = {name: entry["data_offsets"] for name, entry in header.items()}
            end = _LENGTH_BYTES + length + max((span[1] for span in spans.values()), default=0)
            if path.stat().st_size != end:
                return False
            known = json.loads(metadata.get(CHECKSUMS, "{}")) if checked else {}
            starts = {name: _LENGTH_BYTES + length + spans[name][0] for name in known}
            return all(
                _crc(file, starts[name], spans[name][1] - spans[name][0]) == known[name]
                for name in known
            )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _crc(file: BinaryIO, start: int, size: int) -> int:
    found = 0
    file.seek(start)
    while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
        found, size = zlib.crc32(chunk, found), size - len(chunk)
    return found
