"""All jobs of a cluster, as a notebook sees them: submitted here or elsewhere, now or before."""

import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from workbench.client.engines import Engines
from workbench.client.loggers.logger import Logs, loggers
from workbench.client.records.environment import Environment
from workbench.client.run import waiting
from workbench.client.run.job import Job
from workbench.client.run.own_objects import kept
from workbench.client.run.past import PastRun
from workbench.client.run.run import Run, State
from workbench.client.run.submitting import Weights, checkpoint_of, on_ranks, request
from workbench.client.run.trying import try_out
from workbench.client.sweep import Sweep, results, variations
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.html import Markup, element, save, table
from workbench.store import messages, run_folder
from workbench.store.errors import ClusterError, StoreError
from workbench.store.record import RUN_STATES, JobRecord
from workbench.train.run.requests import RunRequests

if TYPE_CHECKING:
    import pandas


HEAD = ("job", "name", "state", "engines", "steps", "")


class Jobs:
    """What was submitted to a cluster, in that order. `jobs[id]` is a run, of the past too.

    Args:
        engines: the engines of the cluster.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def submit(
        self,
        experiment: Experiment,
        engines: int | None = None,
        *,
        priority: int = 0,
        module: nn.Module | None = None,
        weights: Weights = None,
        resume: str | Path | Run | None = None,
        tag: str = "",
        name: str = "",
        log: Logs | Sequence[Logs] | None = None,
    ) -> Run:
        """Queues an experiment; it starts as soon as enough engines are free.

        Args:
            experiment: what to run.
            engines: the number of ranks; None: as many as its plan has. With another number, the
                plan keeps its schemes and group sizes.
            priority: higher goes first.
            module: a module with other values than the one that was traced; see `Cluster.train`.
            weights: other initial values; see `Cluster.train`.
            resume: a checkpoint, or a run that left one, to go on from.
            tag: the sweep, or whatever it is part of, for people.
            name: the job's name; "": its model's.
            log: the loggers of its steps; see `Cluster.train`.

        Raises:
            ClusterError: it can never fit; the text says what would.
            CheckpointError: what to go on from is damaged, missing or of another model.
            ModelError: `module` is needed and missing, or is another model than was traced.
            DataError: your own data set or collate function gives no rows that ranks could share.
            OwnObjectError: your own loss or metric fails when it is tried, or mixes rows.
            OSError: the disk is full.
            ModuleNotFoundError: a logger's package is missing; nothing was submitted.
        """
        if not isinstance(experiment, Experiment):
            raise TypeError(f"submit takes an Experiment, got {type(experiment).__name__}")
        if not self._engines.are_elsewhere:
            try_out(experiment)
        return self._submit(
            experiment,
            engines,
            priority=priority,
            module=module,
            weights=weights,
            resume=resume,
            tag=tag,
            name=name,
            log=log,
        )

    def _submit(
        self,
        experiment: Experiment,
        engines: int | None = None,
        *,
        tag: str = "",
        name: str = "",
        module: nn.Module | None = None,
        log: Logs | Sequence[Logs] | None = None,
        **keywords: Any,
    ) -> Run:
        """As `submit`, without a trial."""
        told = loggers(log)
        if engines is not None and engines != experiment.plan.world_size:
            if (other := on_ranks(experiment, engines)) is None:
                raise ClusterError(
                    f"{experiment.plan!r} cannot be made one for {engines} ranks; "
                    "plan.with_world_size says why"
                )
            experiment = other
        experiment = kept(experiment, self._engines.folder)
        wanted = request(
            self._engines,
            experiment,
            tag=tag,
            name=name,
            module=module,
            **keywords,
        )
        directory = Path(wanted.directory)
        Environment.of(self._engines, experiment, module).write(directory)
        run = self._run(experiment, directory, self._engines.link.submit(wanted))
        if told:
            run.log_to(*told)
        return run

    def sweep(
        self,
        experiment: Experiment,
        *,
        priority: int = 0,
        module: nn.Module | None = None,
        log: Logs | Sequence[Logs] | None = None,
        **values: Iterable[Any],
    ) -> Sweep:
        """Submits the experiment once for each combination of values.

        Args:
            experiment: what is varied.
            priority: the priority of all of them; higher goes first.
            module: as in `submit`.
            log: the loggers of the steps of each; see `Cluster.train`.
            values: the values of each field, by its name: one of the experiment's (`plan`,
                `batch_size`, `sync`, `seed`, ...) or of its optimizer's (`lr`, `momentum`, ...).

        Raises:
            ExperimentError: neither has a field of a name, there are no values for one, or a
                combination cannot be; nothing was submitted.
            ClusterError: one can never fit.
            DataError, OwnObjectError: as in `submit`; nothing was submitted.
            ModuleNotFoundError: a logger's package is missing; nothing was submitted.
        """
        tag = f"sweep-{uuid.uuid4().hex[:8]}"
        alike: dict[str, Any] = dict(priority=priority, module=module, tag=tag, log=loggers(log))
        varied, tried = list(variations(experiment, **values)), None
        for one in () if self._engines.are_elsewhere else (each.experiment for each in varied):
            brought = one.data, one.loss, one.metrics, one.precision, one.plan.graph
            if brought != tried:
                try_out(one)
            tried = brought
        runs = [self._submit(each.experiment, name=each.name, **alike) for each in varied]
        return Sweep(tag, runs, self._engines.link.store)

    def results(self, tag: str) -> "pandas.DataFrame":
        """What came of the jobs of a sweep, of any notebook's: one line for each."""
        return results(self._engines.link.store, tag)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each job: state, engines, steps, when, and why it waits or failed."""
        return jobs_frame(self.records)

    def table(self) -> "pandas.DataFrame":
        """The same as `to_frame`."""
        return self.to_frame()

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    @property
    def records(self) -> tuple[JobRecord, ...]:
        """What the server knows of each that trains, in the order of submission."""
        found = self._engines.link.store.jobs()
        return tuple(job for job in found if job.kind == "train")

    def pause(self, job: int | Run) -> None:
        """Has it leave a checkpoint and its engines, until it is resumed."""
        self._ask("pause", job)

    def resume(self, job: int | Run) -> None:
        """Lets a paused job go on."""
        self._ask("resume", job)

    def stop(self, job: int | Run) -> None:
        """Has it end after its current step, with a checkpoint."""
        self._ask("stop", job)

    def cancel(self, job: int | Run) -> None:
        """Ends it at once, without a checkpoint."""
        self._ask("cancel", job)

    def set_priority(self, job: int | Run, priority: int) -> None:
        """Gives it another priority; higher goes first."""
        self._ask("priority", job, priority=priority)

    def __getitem__(self, job: int) -> Run:
        """A run that follows a job, with all that it has measured so far.

        While a job goes on, everybody in this process gets the same run.

        Raises:
            KeyError: there is no such job, or it trains nothing.
            ClusterError: its experiment lies in a file, which is missing or damaged.
        """
        for run in list(self._engines.followers):
            if isinstance(run, Run) and run.id == job and not run.is_done:
                return run
        try:
            record = self._engines.link.store.job(job)
        except StoreError as error:
            raise KeyError(str(error)) from None
        if record.kind != "train":
            raise KeyError(f"job {job} is {record.name}, and no run")
        directory = Path(record.directory)
        experiment = RunRequests(directory).in_force(
            messages.unpack(record.packed, self._engines.link.key)
        )
        run = self._run(experiment, directory, record.id)
        if record.has_ended:
            waiting.follow(run, None, False)
        return run

    def __iter__(self) -> Iterator[Run]:
        """Yields all runs; one that has ended is read when more than its state is needed."""
        return (self._past(one) if one.has_ended else self[one.id] for one in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def _past(self, record: JobRecord) -> Run:
        """Returns the run of a job that has ended, without reading it."""
        state = cast(State, RUN_STATES.get(record.state, record.state))
        directory, read = Path(record.directory), partial(self.__getitem__, record.id)
        run = PastRun(record.id, directory, state, read)
        self._engines.followers.add(run)
        return run

    def _run(self, experiment: Experiment, directory: Path, number: int) -> Run:
        """A run that follows a job, and keeps its cluster while that goes on."""
        job = Job(self._engines.link, number, keep=self._engines)
        run = Run(experiment, directory, job, partial(_again, weakref.ref(self._engines)))
        self._engines.followers.add(run)
        return run

    def _ask(self, kind: str, job: int | Run, **payload: object) -> None:
        number = job.id if isinstance(job, Run) else job
        self._engines.link.ask(kind, number, **payload)

    def __repr__(self) -> str:
        states: dict[str, int] = {}
        for record in self.records:
            states[record.state] = states.get(record.state, 0) + 1
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"<Jobs of cluster {self._engines.name!r}: {told or 'none'}>"

    def _repr_html_(self) -> Markup:
        return element("div", element("p", repr(self)), table(HEAD, map(_told, self.records)))


def jobs_frame(jobs: Iterable[JobRecord]) -> "pandas.DataFrame":
    """One line for each job."""
    import pandas  # only here: it takes long to load

    return pandas.DataFrame([columns_of(job) for job in jobs])


def columns_of(job: JobRecord) -> dict[str, Any]:
    """What is said of a job, by column; times are of this host's zone."""
    return {
        "job": job.id,
        "name": job.name,
        "state": job.state,
        "engines": list(job.held) or job.engines,
        "priority": job.priority,
        "step": job.step,
        "steps": job.steps,
        "attempts": job.attempt,
        "submitted": _clock(job.submitted_at),
        "started": _clock(job.started_at),
        "ended": _clock(job.ended_at),
        "predicted_seconds": job.seconds,
        "predicted_bytes": job.memory_bytes,
        "sweep": job.tag,
        "reason": job.reason,
        "directory": job.directory,
    }


def lines(jobs: Iterable[JobRecord]) -> str:
    """As text, with a heading."""
    told = [HEAD, *map(_told, jobs)]
    widths = [max(len(line[column]) for line in told) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in told
    )


def _told(job: JobRecord) -> tuple[str, ...]:
    engines = ", ".join(map(str, job.held)) if job.held else f"{job.engines} wanted"
    why = job.reason.partition("\n")[0]
    return (str(job.id), job.name, job.state, engines, f"{job.step} of {job.steps}", why)


def _clock(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds)


def _again(cluster: weakref.ref[Engines], run: Run) -> Job:
    """Has a run that has ended go on; the job to follow then.

    Raises:
        ClusterError: the cluster is gone: a run that has ended does not keep it alive. Or the run
            left no checkpoint.
    """
    if (engines := cluster()) is None:
        raise ClusterError(
            f"the cluster of {run!r} is gone; another one can go on: "
            "cluster.train(run.experiment, resume=run)"
        )
    engines.require(run.experiment.plan)
    link = engines.link
    for record in link.store.jobs():
        if record.id == run.id and record.directory == str(run.directory):
            checkpoint_of(run, run.experiment.plan.graph)  # raises where there is none
            link.store.repack(record.id, link.packed(run.experiment))
            link.ask("resume", record.id)
            return Job(link, record.id, after=record.attempt, keep=engines)
    # It is another cluster's, or this one has forgotten it.
    wanted = request(engines, run.experiment, resume=run, directory=run.directory)
    Environment.of(engines, run.experiment).write(run.directory)
    earlier = run_folder.last_attempt(run.directory)
    return Job(link, link.submit(wanted), after=earlier, keep=engines)
