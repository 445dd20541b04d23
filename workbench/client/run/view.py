"""What is seen of a run: who is told of new rows, its evaluations, and how it is shown."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workbench.client.run.rows import Rows
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.plan.io.html import Markup, element, lines, table
from workbench.plan.io.units import size
from workbench.store.run_folder import read_evaluations

if TYPE_CHECKING:
    import pandas

Callback = Callable[[list[Row]], None]


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


class ShownRun(Protocol):
    """A run, as far as it is shown; see `Run`."""

    directory: Path
    reason: str
    notes: list[str]
    error: BaseException | None

    @property
    def rows(self) -> Rows:
        """Its metrics."""

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
    if rows := run.rows.newest(run.experiment.plan.world_size):
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
    newest = run.rows.newest(world_size)
    return done(newest) if len(newest) == world_size else 0


def html(run: ShownRun) -> Markup:
    """A run for a notebook, in inline styles: it reads well without a kernel."""
    head = ("rank", "compute", "communication", "wait", "tensors", "peak", "process", "GPU")
    plan = run.experiment.plan
    ranks = [
        (
            str(int(row["rank"])),
            f"{row['compute_s'] * 1e3:.0f} ms",
            f"{row['communication_s'] * 1e3:.0f} ms",
            f"{row['wait_s'] * 1e3:.0f} ms",
            size(row["tensor_bytes"]),
            size(run.rows.peaks[int(row["rank"])]),
            size(row["rss_bytes"]),
            size(row["gpu_bytes"]) if row["gpu_bytes"] else "-",
        )
        for row in run.rows.newest(plan.world_size)
    ]
    told = lines([", ".join(standing(run)), str(run.directory), *run.notes])
    return element(
        "div",
        element("p", element("b", plan.graph.source.name), ": ", told),
        *([element("pre", str(run.error))] if run.error is not None else []),
        *([table(head, ranks)] if ranks else []),
    )
