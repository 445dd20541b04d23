"""All jobs of a cluster, as a notebook sees them: submitted here or elsewhere, now or before."""

import uuid
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.client.jobs.results import results
from workbench.client.jobs.sweep import Sweep
from workbench.client.jobs.table import columns_of, html
from workbench.client.jobs.variations import sweep
from workbench.client.run.resume import checkpoint_of
from workbench.client.run.run import Run
from workbench.client.run.submitting import Terms, plan_for
from workbench.plan.experiment import Experiment
from workbench.store.errors import ClusterError, StoreError
from workbench.store.record import JobRecord

if TYPE_CHECKING:
    import pandas

    from workbench.client.cluster import Cluster


class Jobs:
    """What was submitted to a cluster, in that order. `jobs[id]` is a run, of the past too.

    Args:
        cluster: whose.
    """

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def submit(
        self,
        experiment: Experiment,
        engines: int | None = None,
        *,
        priority: int = 0,
        min_engines: int | None = None,
        max_engines: int | None = None,
        module: nn.Module | None = None,
        resume: str | Path | Run | None = None,
        tag: str = "",
        name: str = "",
    ) -> Run:
        """Queues an experiment; it starts as soon as enough engines are free.

        Args:
            experiment: what to run.
            engines: ranks; None: as many as its plan has. With another number, the plan keeps its
                schemes and group sizes.
            priority: higher goes first.
            min_engines: fewest ranks that it goes on with when engines are short.
            max_engines: most ranks that it grows to when engines are free.
            module: the user's own module, where the model was traced from one.
            resume: a checkpoint, or a run that left one, to go on from.
            tag: what it is part of, for people.
            name: what it is called; "": as its model.

        Raises:
            ClusterError: it can never fit; the text says what would.
            CheckpointError: what to go on from is damaged, missing or of another model.
            ModelError: `module` is missing, or is another one than was traced.
            ControlMessageTooLarge: the model's own code is too large for a control message.
        """
        if not isinstance(experiment, Experiment):
            raise TypeError(f"submit takes an Experiment, got {type(experiment).__name__}")
        if engines is not None and engines != experiment.plan.world_size:
            other = plan_for(experiment, engines)
            if other is None:
                raise ClusterError(
                    f"{experiment.plan!r} cannot be made one for {engines} ranks; "
                    "plan.with_world_size says why"
                )
            experiment = other
        terms = Terms(
            task=self._cluster.task,
            priority=priority,
            min_engines=min_engines,
            max_engines=max_engines,
            tag=tag,
            name=name,
        )
        checkpoint = checkpoint_of(resume, experiment.plan.graph)
        return self._cluster.launch(experiment, terms, module=module, checkpoint=checkpoint)

    def sweep(
        self,
        experiment: Experiment,
        *,
        priority: int = 0,
        module: nn.Module | None = None,
        **values: Iterable[Any],
    ) -> Sweep:
        """Submits the experiment once for each combination of values.

        Args:
            experiment: what is varied.
            priority: of all of them.
            module: as in `submit`.
            values: by the name of one of the experiment's fields (`plan`, `batch_size`, `sync`,
                `seed`, ...) or of its optimizer's (`lr`, `momentum`, ...).

        Raises:
            ExperimentError: a name that neither has, no values, or a combination that cannot be;
                nothing was submitted.
            ClusterError: one can never fit.
        """
        tag = f"sweep-{uuid.uuid4().hex[:8]}"
        runs = [
            self.submit(each.experiment, priority=priority, module=module, tag=tag, name=each.name)
            for each in sweep(experiment, **values)
        ]
        return Sweep(tag, runs, self._cluster.link.store)

    def results(self, tag: str) -> "pandas.DataFrame":
        """What came of the jobs of a sweep, of any notebook's: one line for each."""
        return results(self._cluster.link.store, tag)

    def table(self) -> "pandas.DataFrame":
        """One line for each job: state, engines, steps, when, and why it waits or failed."""
        import pandas

        return pandas.DataFrame([columns_of(job) for job in self.records])

    @property
    def records(self) -> tuple[JobRecord, ...]:
        """What the server knows of each that trains, in the order of submission."""
        found = self._cluster.link.store.jobs()
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

    def prioritise(self, job: int | Run, priority: int) -> None:
        """Gives it another priority; higher goes first."""
        self._ask("priority", job, priority=priority)

    def __getitem__(self, job: int) -> Run:
        """A run that follows a job, with all that it has measured so far.

        Raises:
            KeyError: there is no such job, or it trains nothing.
        """
        try:
            record = self._cluster.link.store.job(job)
        except StoreError as error:
            raise KeyError(str(error)) from None
        if record.kind != "train":
            raise KeyError(f"job {job} is {record.name}, and no run")
        return self._cluster.follow(record)

    def __iter__(self) -> Iterator[Run]:
        return (self[record.id] for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def _ask(self, kind: str, job: int | Run, **payload: object) -> None:
        number = job.id if isinstance(job, Run) else job
        self._cluster.link.ask(kind, number, **payload)

    def __repr__(self) -> str:
        states: dict[str, int] = {}
        for record in self.records:
            states[record.state] = states.get(record.state, 0) + 1
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"<Jobs of cluster {self._cluster.name!r}: {told or 'none'}>"

    def _repr_html_(self) -> str:
        return f"<div><p>{escape(repr(self))}</p>{html(self.records)}</div>"
