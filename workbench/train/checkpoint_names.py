"""Where the checkpoints of a run are; for processes, too, that load no tensors and no torch."""

import re
from pathlib import Path

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
