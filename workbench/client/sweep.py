"""One experiment with several values of its fields, and what came of each: one job, one line."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench.client.records.runs import differences, short
from workbench.client.run.run import Run
from workbench.client.run.waiting import TICK_S
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.html import Markup, frame_html, save
from workbench.plan.io.value import Value
from workbench.store import messages
from workbench.store.rank_files import RankFiles
from workbench.store.record import JobRecord
from workbench.store.run_folder import last_evaluation
from workbench.store.store import Store
from workbench.store.telemetry import newest, unpack_rows

if TYPE_CHECKING:
    import pandas


class Sweep:
    """Runs that were submitted together.

    Args:
        runs: the runs, in the order of submission.
    """

    def __init__(self, tag: str, runs: Sequence[Run], store: Store) -> None:
        self.tag, self.runs, self._store = tag, tuple(runs), store

    def wait(self, timeout: float | None = None) -> Self:
        """Returns when all have ended, in whatever way; an interrupt stops all of them.

        Raises:
            TimeoutError: one did not end in time; they go on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for run in self.runs:
                while not run.join(TICK_S):
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"{self!r} after {timeout:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Has all of them end after their current step."""
        for run in self.runs:
            run.stop()

    def table(self) -> "pandas.DataFrame":
        """One line for each run: its own values, how far it is, and what it reached.

        See `results`; `cluster.jobs.results(tag)` has it where this object is gone.
        """
        return results(self._store, self.tag)

    def to_frame(self) -> "pandas.DataFrame":
        """The same as `table`."""
        return self.table()

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __repr__(self) -> str:
        done = sum(run.is_done for run in self.runs)
        return f"<Sweep {self.tag}: {done} of {len(self)} runs have ended>"

    def _repr_html_(self) -> Markup:
        return frame_html(f"{len(self)} runs", self.table(), "runs")


@dataclass(frozen=True)
class Variation:
    """One of a sweep's experiments.

    Attributes:
        values: what was chosen for it, by name.
        name: the chosen values for people, "lr=0.1, seed=2".
    """

    experiment: Experiment
    values: Mapping[str, Any]
    name: str


def variations(experiment: Experiment, **values: Iterable[Any]) -> tuple[Variation, ...]:
    """Every combination of values, the last name varying fastest.

    Args:
        values: the values of each field, by its name: one of the experiment's (`plan`,
            `batch_size`, `sync`, ...) or of its optimizer's (`lr`, `momentum`, ...).

    Raises:
        ExperimentError: neither has a field of a name, there are no values for one, or a
            combination cannot be; the text says which.
    """
    choices = {name: _several(name, each) for name, each in values.items()}
    return tuple(
        _varied(experiment, dict(zip(choices, each, strict=True)))
        for each in product(*choices.values())
    )


def _several(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | Mapping | Value) or not isinstance(values, Iterable):
        raise ExperimentError(f"{name}: a list of values is needed, got {values!r}; [{values!r}]?")
    if not (found := list(values)):
        raise ExperimentError(f"{name}: a list of values is needed, got none")
    return found


def _varied(experiment: Experiment, values: Mapping[str, Any]) -> Variation:
    own = {name: each for name, each in values.items() if name in Experiment.model_fields}
    rest = {name: each for name, each in values.items() if name not in own}
    optimizer = own.pop("optimizer", experiment.optimizer)
    known = type(optimizer).model_fields
    if strangers := sorted(rest.keys() - known.keys()):
        valid = ", ".join(sorted({*Experiment.model_fields, *known}))
        raise ExperimentError(
            f"neither an experiment nor its {type(optimizer).__name__} has "
            f"{', '.join(strangers)}; there are {valid}"
        )
    name = ", ".join(f"{name}={short(each)}" for name, each in values.items())
    try:
        varied = experiment.replace(optimizer=optimizer.replace(**rest), **own)
    except ValueError as error:
        raise ExperimentError(f"{name}: {error}") from None
    return Variation(varied, values, name)


def results(store: Store, tag: str) -> "pandas.DataFrame":
    """One line for each job of a sweep: what is its own, how far it is, and what it reached.

    Columns: `job`; the fields of experiments in which these differ; `state`, `step`; `loss`,
    `accuracy` (on the test split) and `samples_per_s` as last measured, NaN before; `duration`,
    seconds from its start to its end, or until now; `reason`; `test_loss`, and `test_f1` of a
    metric "f1".

    Raises:
        ClusterError: an experiment lies in a file, which is missing or damaged.
    """
    import pandas  # only here: the job server imports this package too, and has no use for it

    jobs = [store.job(each.id) for each in store.jobs(tag=tag)]
    own = differences([messages.unpack(job.packed) for job in jobs])
    return pandas.DataFrame(
        [{"job": job.id, **values, **_reached(job)} for job, values in zip(jobs, own, strict=True)]
    )


def _reached(job: JobRecord) -> dict[str, Any]:
    rows = _last_row(job)
    duration = math.nan
    if job.started_at is not None:
        duration = (job.ended_at or time.time()) - job.started_at
    return {
        "state": job.state,
        "step": job.step,
        "loss": rows[-1]["loss"] if rows else math.nan,
        "accuracy": math.nan,
        "samples_per_s": rows[-1]["samples_per_s"] if rows else math.nan,
        "duration": duration,
        "reason": job.reason,
        **last_evaluation(Path(job.directory)),
    }


def _last_row(job: JobRecord) -> list[Row]:
    """The newest row of rank 0, if it has any."""
    for attempt in range(job.attempt, 0, -1):
        files = RankFiles(Path(job.directory) / "attempts" / str(attempt), 0)
        if rows := list(unpack_rows(newest(files.rows, 1))):
            return rows
    return []
