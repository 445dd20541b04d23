"""Loggers: JSON lines, the event files of TensorBoard, and Weights & Biases.

None uses a global "current run", so that runs that go on at the same time stay apart.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases, beside whose steps stands the whole configuration.

    It runs in the process that holds the run: where a notebook closes, the run goes on, and its
    steps are missing there. `cluster.jobs[id].log_to(...)`, or `wb.Run.load(folder).log_to(...)`
    later, sends all of them. A run that is resumed goes on under the same name and id.

    Attributes:
        project: the project's name.
        name: the run's name there; None: that of its folder.
        offline: whether to write to the run's folder alone; `wandb sync` sends that later.
        settings: further arguments of `wandb.init`, such as `entity` or `tags`.
    """

    project: str = "parallel-workbench"
    name: str | None = None
    offline: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def require(self) -> None:
        """Checks that wandb is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("wandb", "wandb", "wb.WandB")

    def open(self, run: LoggedRun) -> Log:
        """Begins a run there, or goes on with it."""
        import wandb

        opened = wandb.init(
            project=self.project,
            name=self.name or run.name,
            id=f"{run.name}-{zlib.crc32(str(run.directory).encode()):08x}",
            config=dict(run.configuration),
            dir=str(run.directory),
            mode="offline" if self.offline else "online",
            reinit="create_new",  # other runs go on meanwhile
            resume="allow",
            **self.settings,
        )
        # A step that is run again after a fault comes again: wandb's own count of steps would
        # refuse it.
        opened.define_metric("step")
        opened.define_metric("*", step_metric="step")
        return _WandBRun(opened)


class _WandBRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: Row) -> None:
        self._run.log(step)

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        self._run.summary.update(
            {"state": state, **{f"test_{n}": v for n, v in evaluation.items()}}
        )
        self._run.finish(exit_code=1 if state == "failed" else 0)
