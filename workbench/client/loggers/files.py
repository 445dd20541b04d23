"""Loggers that write files here: JSON lines, and the event files of TensorBoard."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from workbench.client.loggers.logger import Log, LoggedRun
from workbench.client.records.optional import require
from workbench.plan.experiment.metrics import Row


@dataclass(frozen=True)
class JSONLines:
    """Each step as one line of JSON, added to a file as soon as all ranks have made it.

    What is no number (a loss that became NaN) is null there. It is written by the process that
    holds the run: where a notebook closes, the run goes on, and its steps are missing in the file.
    `cluster.jobs[id].log_to(...)`, or `wb.Run.load(folder).log_to(...)` later, writes all of them.

    Attributes:
        path: the file; its folder is made where it is missing.
    """

    path: str | Path

    def require(self) -> None:
        """Nothing is needed."""

    def open(self, run: LoggedRun) -> Log:
        """Opens the file, to add to it."""
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Lines(path.open("a", encoding="utf-8"))


class _Lines:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, step: Row) -> None:
        known = {name: value if math.isfinite(value) else None for name, value in step.items()}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()  # whoever looks sees whole lines

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        self._file.close()


@dataclass(frozen=True)
class TensorBoard:
    """Curves for `tensorboard --logdir FOLDER`: one for each column, and one run beside others.

    Written by the process that holds the run; see `JSONLines`.

    Attributes:
        folder: the folder of all runs; each has one of its own in it.
    """

    folder: str | Path = "tensorboard"

    def require(self) -> None:
        """Checks that tensorboard is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("tensorboard", "tensorboard", "wb.TensorBoard")

    def open(self, run: LoggedRun) -> Log:
        """Begins another event file in the run's own folder."""
        from torch.utils.tensorboard import SummaryWriter  # needs tensorboard

        writer: Any = SummaryWriter(str(Path(self.folder) / run.name))
        lines = [f"| {name} | {value} |" for name, value in run.configuration.items()]
        writer.add_text("configuration", "\n".join(["| field | value |", "|---|---|", *lines]))
        return _Events(writer)


class _Events:
    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._last = 0

    def write(self, step: Row) -> None:
        self._last = int(step["step"])
        for name, value in step.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, self._last, walltime=step["time"])

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        for name, value in evaluation.items():
            self._writer.add_scalar(f"test/{name}", value, self._last)
        self._writer.close()
