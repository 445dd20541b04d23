"""Engines that the job server lends for as long as a call takes, and the calls on them."""

import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from workbench.client.connection import TICK_S, ClusterLink
from workbench.client.engines import Engines
from workbench.client.run.job import Job
from workbench.client.run.own_objects import kept
from workbench.hosts.processes import until
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan
from workbench.store import messages
from workbench.store.errors import ClusterError
from workbench.store.record import Request

# An engine that another job gives back, or that is started again, may be free in a moment.
REFUSED_AFTER_S = 1.0
# The job server gives them back with its next look at what runs.
RELEASED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Lease:
    """An engine for each rank of a plan, for calls that the caller waits for.

    Attributes:
        id: the job that holds the engines; None: the assistant, which nobody lends.
    """

    link: ClusterLink
    places: tuple[int, ...]
    id: int | None = None

    @classmethod
    def of_assistant(cls, engines: Engines) -> "Lease":
        """The engine that is no rank, and does what is done once for all of them."""
        return cls(engines.link, (len(engines),))

    def start(self, task: str, experiment: Experiment, shared: Mapping[str, Any]) -> Job:
        """Calls a task on every engine.

        Args:
            task: its name, or "module:function". It gets `experiment`, `config` if it is a rank of
                several, and what `shared` names. `weights` of None stand for the model's initial
                weights, which the job server has the assistant write before.

        Raises:
            ControlMessageTooLarge: the keywords take more than 64 KiB.
            OSError: the experiment needs a file, and the disk is full.
        """
        experiment = kept(experiment, self.link.folder)
        request = Request(
            kind="call",
            name=f"a call of {task}",
            task=task,
            packed=self.link.packed(experiment),
            keywords=messages.pack_keywords(shared, self.link.key),
            engines=len(self.places),
            places=self.places,
            lease=self.id,
            directory=str(self.link.folder / "calls" / uuid.uuid4().hex),
            owner=self.link.owner,
            # The assistant makes them itself.
            needs_weights=self.id is not None and shared.get("weights", self) is None,
        )
        return Job(self.link, self.link.submit(request))

    def call(self, task: str, experiment: Experiment, shared: Mapping[str, Any]) -> list[Any]:
        """As `start`; waits for what each rank returns.

        An interrupt of the caller interrupts the ranks first.

        Raises:
            RunError: a rank failed.
        """
        job = self.start(task, experiment, shared)
        try:
            return job.watch()
        except KeyboardInterrupt:
            job.abort()
            return job.watch()  # raises KeyboardInterrupt once all have ended
        finally:
            shutil.rmtree(self.link.store.job(job.id).directory, ignore_errors=True)


@contextmanager
def lent(engines: Engines, plan: Plan, holder: str) -> Iterator[Lease]:
    """Engines for a plan's ranks for as long as the body runs.

    Args:
        holder: what the engines are used for, for people.

    Raises:
        ClusterError: the plan needs more engines than are here, or free.
    """
    engines.require(plan)
    link = engines.link
    wanted = Request(kind="lease", name=holder, task="", engines=plan.world_size, owner=link.owner)
    lease = link.submit(wanted)
    try:
        yield Lease(link, _granted(engines, lease), lease)
    finally:
        link.ask("release", lease)
        # Until others may have them.
        until(lambda: link.store.job(lease).has_ended, RELEASED_WITHIN_S, TICK_S)


def _granted(engines: Engines, lease: int) -> tuple[int, ...]:
    """Waits for engines that are being started, and not for those that others use."""
    link, num_engines = engines.link, len(engines)
    record, patience = link.store.job(lease), time.monotonic() + REFUSED_AFTER_S
    while not record.held:
        if record.has_ended:
            raise ClusterError(f"{record.name} was {record.state}: {record.reason}")
        holders = engines.occupied
        free = num_engines - len(holders)
        if free >= record.engines:
            patience = time.monotonic() + REFUSED_AFTER_S
        elif time.monotonic() > patience:
            raise ClusterError(
                f"{record.engines} engines are needed and {free} of {num_engines} are "
                f"free; the others are used by {'; '.join(dict.fromkeys(holders.values()))}. "
                "Await it or stop it first"
            )
        time.sleep(TICK_S)
        record = link.refreshed(record)
    return record.held
