"""Folders of runs, and what is written there beside checkpoints."""

import os
import re
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plan.experiment import Experiment

if TYPE_CHECKING:
    import pandas


def last_attempt(directory: Path) -> int:
    """The number of the last attempt at a run; 0: there was none."""
    names = (path.name for path in (directory / "attempts").glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def new_directory(parent: Path, experiment: Experiment) -> Path:
    """Makes `<parent>/<date>-<time>-<model>`, numbered where there is one already.

    It holds `experiment.toml`, so that a run can be repeated from its folder.
    """
    model = re.sub(r"[^\w.-]", "_", experiment.plan.graph.source.name)
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        write(directory / "experiment.toml", experiment.to_toml())
        return directory
    raise AssertionError("unreachable")


def write_metrics(directory: Path, metrics: "pandas.DataFrame") -> None:
    """Writes `metrics.csv`."""
    write(directory / "metrics.csv", metrics.to_csv(index=False))


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
