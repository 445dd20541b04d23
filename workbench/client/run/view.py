"""What is seen of a run: its rows as a table, who is told of new ones, and how it is shown."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.measured import COLUMNS, Row
from workbench.plan.html import table
from workbench.plan.units import size
from workbench.store.evaluations import read_evaluations

if TYPE_CHECKING:
    import pandas

Callback = Callable[[list[Row]], None]


class Frame:
    """A table that is made anew only where there are more rows; any thread may ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame: pandas.DataFrame | None = None
        self._num_rows = 0

    def of(self, rows: Sequence[Row]) -> "pandas.DataFrame":
        """One line for each step and rank, sorted; of a step that was run again, the last."""
        import pandas  # only here: engines import this package too, and have no use for it

        with self._lock:
            if self._frame is None or self._num_rows != len(rows):
                frame = pandas.DataFrame(rows, columns=list(COLUMNS))
                frame = frame.drop_duplicates(["step", "rank"], keep="last")
                self._frame = frame.sort_values(["step", "rank"], ignore_index=True)
                self._num_rows = len(rows)
            return self._frame.copy()


def evaluations(directory: Path) -> "pandas.DataFrame":
    """The figures of a run's evaluations, by the steps that were done before each."""
    import pandas

    found = read_evaluations(directory)
    frame = pandas.DataFrame(list(found.values()), index=pandas.Index(list(found), name="done"))
    return frame.reset_index()


class Subscribers:
    """Functions that are called with new rows; from any thread they may come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> Callable[[], None]:
        """Takes a function; gives one that lets go of it."""
        with self._lock:
            self._callbacks.append(callback)
        return partial(self._remove, callback)

    def tell(self, rows: list[Row]) -> Iterator[str]:
        """Calls all of them; says of which it let go, since they raised."""
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback(rows)
            except Exception as error:  # a broken view is no reason to lose a run
                self._remove(callback)
                yield f"a subscriber failed and was dropped: {error!r}"

    def _remove(self, callback: Callback) -> None:
        with self._lock, suppress(ValueError):
            self._callbacks.remove(callback)


def latest(rows: Sequence[Row], world_size: int) -> list[Row]:
    """The newest row of each rank, in their order."""
    found: dict[int, Row] = {}
    for row in reversed(rows):
        found.setdefault(int(row["rank"]), row)
        if len(found) == world_size:
            break
    return [found[rank] for rank in sorted(found)]


class ShownRun(Protocol):
    """A run, as far as it is shown; see `Run`."""

    directory: Path
    reason: str
    rows: list[Row]
    notes: list[str]
    error: BaseException | None

    @property
    def experiment(self) -> Experiment:
        """What runs."""

    @property
    def state(self) -> str:
        """Its state."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""

    @property
    def evaluation(self) -> dict[str, float]:
        """Loss and metrics on the test split."""


def standing(run: ShownRun) -> list[str]:
    """Where a run stands: state, step, loss, speed, metrics, error."""
    told = [run.state]
    if run.is_stopping and not run.is_done:
        told[0] += " (stopping)"
    if run.reason:
        told[0] += f": {run.reason}"
    if rows := latest(run.rows, run.experiment.plan.world_size):
        told.append(f"step {done(rows)} of {run.experiment.steps}")
        told.append(f"loss {rows[0]['loss']:.4g}")
        told.append(f"{rows[0]['samples_per_s']:.4g} samples/s")
    told += figures(run.evaluation)
    if run.error is not None:
        told.append(str(run.error).partition("\n")[0])
    return told


def figures(evaluation: Mapping[str, float]) -> list[str]:
    """What an evaluation found, but for the loss: each figure with its name."""
    return [
        f"test {name} " + (f"{value:.1%}" if name == "accuracy" else f"{value:.4g}")
        for name, value in evaluation.items()
        if name != "loss"
    ]


def done(rows: Sequence[Row]) -> int:
    """The steps that all ranks have made, by the newest row of each."""
    return int(min(row["step"] for row in rows)) + 1


def made(run: ShownRun) -> int:
    """The steps that every rank has reported."""
    world_size = run.experiment.plan.world_size
    newest = latest(run.rows, world_size)
    return done(newest) if len(newest) == world_size else 0


def html(run: ShownRun) -> str:
    """A run for a notebook, in inline styles: it reads well without a kernel."""
    peaks = dict[float, float]()
    for row in run.rows[:]:
        peaks[row["rank"]] = max(row["peak_bytes"], peaks.get(row["rank"], 0))
    head = ("rank", "compute", "communication", "wait", "tensors", "peak", "process", "GPU")
    plan = run.experiment.plan
    ranks = [
        (
            str(int(row["rank"])),
            f"{row['compute_s'] * 1e3:.0f} ms",
            f"{row['communication_s'] * 1e3:.0f} ms",
            f"{row['wait_s'] * 1e3:.0f} ms",
            size(row["tensor_bytes"]),
            size(peaks[row["rank"]]),
            size(row["rss_bytes"]),
            size(row["gpu_bytes"]) if row["gpu_bytes"] else "-",
        )
        for row in latest(run.rows, plan.world_size)
    ]
    lines = [", ".join(standing(run)), str(run.directory), *run.notes]
    failed = f"<pre>{escape(str(run.error))}</pre>" if run.error is not None else ""
    return (
        f"<div><p><b>{escape(plan.graph.source.name)}</b>: {'<br>'.join(map(escape, lines))}</p>"
        f"{failed}{table(head, ranks) if ranks else ''}</div>"
    )
