"""Calls on engines, which the job server lends for as long as they take."""

import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from workbench.client.connection import TICK_S, Link
from workbench.client.run.remote import RemoteJob
from workbench.hosts.processes import until
from workbench.plan.plan import Plan
from workbench.store import message
from workbench.store.errors import ClusterError
from workbench.store.record import JobRecord, Request

# An engine that another job gives back, or that is started again, may be free in a moment.
REFUSED_AFTER_S = 1.0
# The job server gives them back with its next look at what runs.
RELEASED_WITHIN_S = 10.0


class Dispatch:
    """Gives each rank of a plan an engine of its own, for calls that the caller waits for.

    Args:
        link: to the cluster.
        num_engines: that take ranks.
    """

    def __init__(self, link: Link, num_engines: int) -> None:
        self._link, self._num_engines = link, num_engines
        self._lock = threading.Lock()
        self._leases: dict[tuple[int, ...], int] = {}

    def require(self, plan: Plan) -> None:
        """Raises ClusterError unless these engines could run the plan."""
        self._link.require()
        if plan.world_size > self._num_engines:
            raise ClusterError(
                f"the plan is for {plan.world_size} ranks, but this cluster has "
                f"{self._num_engines} engines: start Cluster({plan.world_size}), or make a "
                f"plan with world_size={self._num_engines}"
            )

    @contextmanager
    def taken(self, plan: Plan, holder: str) -> Iterator[tuple[int, ...]]:
        """Engines for a plan's ranks for as long as the body runs.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
        """
        self.require(plan)
        wanted = Request(
            kind="lease", name=holder, task="", engines=plan.world_size, owner=self._link.owner
        )
        lease = self._link.submit(wanted)
        try:
            places = self._granted(lease)
            with self._lock:
                self._leases[places] = lease
            yield places
        finally:
            with self._lock:
                self._leases = {at: held for at, held in self._leases.items() if held != lease}
            self._released(lease)

    def start(
        self, task: str, packed: bytes, places: Sequence[int], shared: Mapping[str, Any]
    ) -> RemoteJob:
        """Calls "module:function" on engines that were taken, or on the assistant.

        Args:
            task: gets `seat` if it is a rank of several, and what `shared` names.
            packed: the experiment, as a control message.
            places: the engine of each rank.
            shared: keywords that are the same for all ranks.

        Raises:
            ControlMessageTooLarge: the experiment or the keywords take more than 64 KiB.
        """
        with self._lock:
            lease = self._leases.get(tuple(places))
        directory = self._link.folder / "calls" / uuid.uuid4().hex
        request = Request(
            kind="call",
            name=f"a call of {task}",
            task=task,
            packed=packed,
            keywords=message.pack_keywords(shared),
            engines=len(places),
            places=tuple(places),
            lease=lease,
            directory=str(directory),
            owner=self._link.owner,
        )
        return RemoteJob(self._link, self._link.submit(request))

    def called(
        self, task: str, packed: bytes, places: Sequence[int], shared: Mapping[str, Any]
    ) -> list[Any]:
        """As `start`; waits for what each rank returns.

        An interrupt of the caller interrupts the ranks first.

        Raises:
            RunError: a rank failed.
        """
        job = self.start(task, packed, places, shared)
        try:
            return job.watch()
        except KeyboardInterrupt:
            job.abort()
            return job.watch()  # raises KeyboardInterrupt once all have ended
        finally:
            shutil.rmtree(self._link.store.job(job.id).directory, ignore_errors=True)

    def _released(self, lease: int) -> None:
        """Gives the engines back, and waits until others may have them."""
        self._link.ask("release", lease)
        until(lambda: self._link.store.job(lease).has_ended, RELEASED_WITHIN_S, TICK_S)

    def _granted(self, lease: int) -> tuple[int, ...]:
        """Waits for engines that are being started, and not for those that others use."""
        record, patience = self._link.store.job(lease), time.monotonic() + REFUSED_AFTER_S
        while not record.held:
            if record.has_ended:
                raise ClusterError(f"{record.name} was {record.state}: {record.reason}")
            holders = self._holders()
            free = self._num_engines - len(holders)
            if free >= record.engines:
                patience = time.monotonic() + REFUSED_AFTER_S
            elif time.monotonic() > patience:
                raise ClusterError(
                    f"{record.engines} engines are needed and {free} of {self._num_engines} are "
                    f"free; the others are used by {'; '.join(dict.fromkeys(holders.values()))}. "
                    "Await it or stop it first"
                )
            time.sleep(TICK_S)
            record = self._link.refreshed(record)
        return record.held

    def _holders(self) -> dict[int, str]:
        return holders(self._link, self._num_engines)


def holders(link: Link, num_engines: int) -> dict[int, str]:
    """For each engine in use, what uses it."""
    by_job: dict[int, str] = {}
    found = {}
    for engine in link.store.engines():
        if engine.job is not None and engine.index < num_engines:
            if engine.job not in by_job:
                by_job[engine.job] = _name(link.store.job(engine.job))
            found[engine.index] = by_job[engine.job]
    return found


def _name(record: JobRecord) -> str:
    return f"a run of {record.name}, job {record.id}" if record.kind == "train" else record.name
