"""A run of the past as a job that has ended: what its folder says, without any cluster.

    experiment.toml, requests/          what ran
    attempts/*/rank-*.rows              its metrics; else metrics.csv
    outcome.json, notes.json            how it ended, and what else should be known

Nothing of it is executed: what ranks answered is Python's own pickled form, and is not read here.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from workbench.client.engines import Engines
from workbench.client.run.job import Listener, exception_of, told
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.store.errors import ClusterError
from workbench.store.messages import TrainingOutcome
from workbench.store.record import EventRecord
from workbench.store.run_folder import EXPERIMENT, METRICS, RunOutcome, attempts, read_notes
from workbench.store.telemetry import ROWS_AT_ONCE, AttemptReader
from workbench.train.checkpoint.checkpoint import latest
from workbench.train.run.requests import RunRequests

UNFINISHED = (
    "its folder does not say how it ended: it goes on, or its cluster ended before it; "
    "wb.Cluster.attach has both go on"
)


class RecordedJob:
    """The job of a run that is read from its folder.

    With `trust`, `experiment` may import what the folder names.

    Raises:
        ClusterError: it is no run's folder, or a file in it cannot be read.
        ExperimentError: the experiment in it is wrong.
        PlanError: the plan in it is wrong.
    """

    def __init__(self, directory: Path, *, trust: bool = False) -> None:
        if not (directory / EXPERIMENT).is_file():
            raise ClusterError(f"{directory} is no run's folder: {EXPERIMENT} is not there")
        self._directory = directory
        self.outcome = RunOutcome.load(directory)
        self.id = None if self.outcome is None else self.outcome.job
        self.has_lost_rows = self.outcome is not None and self.outcome.has_lost_rows
        self.experiment = self._experiment(trust)

    @property
    def cluster(self) -> Engines | None:
        """None: nothing here needs one."""
        return None

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank in the last attempt; () where the folder does not say."""
        past = () if self.outcome is None else self.outcome.attempts
        return past[-1].places if past else ()

    def events(self, after: int) -> tuple[EventRecord, ...]:
        """Refused: events are the cluster's.

        Raises:
            ClusterError: always.
        """
        self._refuse("its events are in its cluster's database")

    def again(self, _run: object) -> NoReturn:
        """Refused: only a cluster has engines.

        Raises:
            ClusterError: always.
        """
        self._refuse("a cluster goes on with it: cluster.train(experiment, resume=run)")

    def stop(self) -> None:
        """Nothing is left to stop."""

    def pause(self) -> None:
        """Nothing is left to pause."""

    def resume(self) -> None:
        """Refused, as `again`."""
        self.again(self)

    def goes_on_as(self, experiment: Experiment) -> None:
        """Nothing goes on."""

    def watch(self, listener: Listener | None = None) -> list[Any]:
        """Tells all that the folder holds, and returns or raises as the job did at its end.

        Raises:
            RunError: the run failed.
        """
        if listener is not None:
            for rows in self._rows():
                listener.take(rows)
            for note in self._notes():
                listener.note(note)
        if self.outcome is None or self.outcome.ranks:
            return self._ranks()
        if self.outcome.error is not None:
            raise exception_of(self.outcome.error, self.outcome.error.text)
        return []

    def _ranks(self) -> list[TrainingOutcome]:
        """What ranks reported; the checkpoint is looked for here, as folders are moved."""
        ranks = () if self.outcome is None else self.outcome.ranks
        found = latest(self._directory)
        checkpoint = None if found is None else str(found)
        return [replace(each, checkpoint=checkpoint) for each in ranks]

    def _notes(self) -> Iterator[str]:
        """Those that somebody kept who followed it to its end, or else what can be told anew."""
        yield from read_notes(self._directory)
        past = () if self.outcome is None else self.outcome.attempts
        yield from (told(each) for each in past[:-1] if each.reason)
        if self.outcome is None:
            yield UNFINISHED

    def _rows(self) -> Iterator[list[Row]]:
        """The metrics, in pieces; rows of another version have other columns."""
        is_readable = self.outcome is None or self.outcome.columns == COLUMNS
        found = attempts(self._directory) if is_readable else ()
        for folder, num_ranks in found:
            reader = AttemptReader(folder, num_ranks)
            while rows := reader.read(ROWS_AT_ONCE):
                rows.sort(key=lambda row: (row["step"], row["rank"]))
                yield rows
        table = self._directory / METRICS
        if not found and table.exists():
            import pandas  # only here: it takes long to load

            lines = pandas.read_csv(table).to_dict("records")
            yield [{name: line.get(name, math.nan) for name in COLUMNS} for line in lines]

    def _experiment(self, trust: bool) -> Experiment:
        """What ran last: under its last plan, and on its last number of ranks."""
        experiment = Experiment.load(self._directory / EXPERIMENT, trust=trust)
        num_ranks = len(self.engines)
        if num_ranks not in (0, experiment.plan.world_size):
            with suppress(PlanError, ExperimentError):
                plan = experiment.plan.with_world_size(num_ranks)
                experiment = experiment.replace(plan=plan)
        return RunRequests(self._directory).in_force(experiment)

    def _refuse(self, why: str) -> NoReturn:
        raise ClusterError(f"{self._directory.name} was read from its folder, and {why}")
