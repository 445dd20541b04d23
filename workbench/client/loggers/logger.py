"""What a logger is: a value that opens a log for each run; or any function of a step.

    cluster.train(experiment, log=[wb.JSONLines("steps.jsonl"), print])

A step is one dict, of all ranks together:

    step, time, loss, samples_per_s     as rank 0 reports them
    test_loss, test_accuracy, ...       where the step was followed by an evaluation
    compute_s, wait_s, ...              seconds: the mean over ranks
    peak_bytes, rss_bytes, ...          bytes: of the rank with the most
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workbench.plan.experiment.metrics import Row

ALWAYS = frozenset(("step", "time", "loss"))
"""Columns that a step has even where they are no numbers: a loss may have become NaN."""


@dataclass(frozen=True)
class LoggedRun:
    """A run, as far as loggers are told of it before its first step.

    Attributes:
        configuration: the fields of its experiment by name, plain values.
    """

    name: str
    directory: Path
    configuration: Mapping[str, Any]


class Log(Protocol):
    """What a logger has opened for one run; all of it is called on one thread."""

    def write(self, step: Row) -> None:
        """Takes one step."""

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        """Takes how the run ended, and what was measured at last; nothing comes after it."""


@runtime_checkable
class Logger(Protocol):
    """Where the steps of runs are reported to, as a value; it may serve any number of runs."""

    def require(self) -> None:
        """Checks, before a run is submitted, that what is needed is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """

    def open(self, run: LoggedRun) -> Log:
        """Begins a log, or goes on with the log of a run that was resumed."""


Logs = Logger | Callable[[Row], object]


@dataclass(frozen=True)
class CallableLogger:
    """A function of a step, as a logger; nobody tells it of a run's end."""

    function: Callable[[Row], object]

    def require(self) -> None:
        """Nothing is needed."""

    def open(self, run: LoggedRun) -> "CallableLogger":
        """It is its own log."""
        return self

    def write(self, step: Row) -> None:
        """Calls it."""
        self.function(step)

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        """Does nothing."""

    def __repr__(self) -> str:
        return repr(self.function)


def loggers(log: Logs | Sequence[Logs] | None) -> tuple[Logger, ...]:
    """What people give as `log`, as loggers that can be opened.

    Raises:
        TypeError: something that is neither a logger nor a function.
        ModuleNotFoundError: a package is missing; the text says what to install.
    """
    given = () if log is None else log if isinstance(log, list | tuple) else (log,)
    found: list[Logger] = []
    for each in given:
        if isinstance(each, Logger) and not isinstance(each, type):
            found.append(each)
        elif callable(each) and not isinstance(each, type):
            found.append(CallableLogger(each))
        else:
            raise TypeError(
                "log takes loggers, such as wb.JSONLines(path), functions of a step, or a list of "
                f"them, got {each!r}"
            )
    for logger in found:
        logger.require()
    return tuple(found)


def step_of(rows: Sequence[Row]) -> Row:
    """One step, of all ranks together."""
    first = min(rows, key=lambda row: row["rank"])
    step: Row = {}
    for name, value in first.items():
        if name.endswith("_s") and not name.endswith("_per_s"):
            step[name] = statistics.fmean(row[name] for row in rows)
        elif name.endswith("_bytes"):
            step[name] = max(row[name] for row in rows)
        elif name in ALWAYS or (name != "rank" and not math.isnan(value)):
            step[name] = value
    return step
