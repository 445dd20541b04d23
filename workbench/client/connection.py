"""One cluster as a notebook reaches it: through the store and the folder that it has."""

import threading
import time
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from workbench.client.lifecycle import UNFINISHED, end
from workbench.hosts.processes import until
from workbench.plan.experiment.experiment import Experiment
from workbench.scheduler.jobs import refusal
from workbench.store import messages, registry
from workbench.store.cluster_spec import ClusterSpec, key_of
from workbench.store.cluster_store import open_store
from workbench.store.errors import ClusterError, StoreError
from workbench.store.process import ProcessIdentity
from workbench.store.record import JobRecord, Request
from workbench.supervisor import said, supervisor_of

LOOK_EVERY_S = 0.5
TICK_S = 0.02
READY_WITHIN_S = 90.0
ANSWER_WITHIN_S = 10.0
_READY = ("idle", "busy", "paused")


class ClusterLink:
    """Way to a cluster that has a supervisor; may be used from any thread.

    While a process has one that is attached, the cluster lasts.

    Attributes:
        store: its jobs, engines and commands.
    """

    # This process is one owner, however often it attaches.
    _attached: ClassVar[Counter[Path]] = Counter()
    _guard = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.owner = folder, open_store(folder), ProcessIdentity.here()
        self._looked_at = 0.0
        with self._guard:
            self._attached[folder] += 1
        self.store.attach(self.owner)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return registry.name_of(self.folder)

    @cached_property
    def key(self) -> bytes:
        """The cluster's key, under which code goes to engines, and what they return comes back."""
        return key_of(self.folder)

    def packed(self, experiment: Experiment) -> bytes:
        """An experiment as a message to this cluster; a large one lies in its folder.

        Raises:
            OSError: the disk is full, or the cluster's folder is gone.
        """
        packed = messages.pack(experiment, self.key)
        return messages.sendable(packed, self.folder / "experiments")

    @property
    def is_kept(self) -> bool:
        """Whether the cluster has a supervisor; without one its engines have ended."""
        return supervisor_of(self.folder) is not None

    def require(self) -> None:
        """Raises ClusterError unless the cluster has a supervisor."""
        if not self.is_kept:
            raise ClusterError(
                f"the supervisor of cluster {self.name!r} has ended, and its engines with it; "
                "cluster.restart() starts new ones, which go on with its jobs"
            )

    def wait(self, spec: ClusterSpec) -> ClusterSpec:
        """Returns when all engines, and the job server, are ready; the cluster, as it is then.

        Raises:
            ClusterError: they did not come up; the text holds what they wrote.
        """
        num_engines, within_s = spec.num_engines, READY_WITHIN_S
        if spec.launch is not None:
            within_s += spec.launch.start_within_s

        def ready() -> bool:
            if not self.is_kept:
                raise ClusterError(f"the engines did not start:\n{said(self.folder)}")
            engines = self.store.engines()[:num_engines]
            # Those of an earlier supervisor are named there until this one has started its own.
            ready = (each.process for each in engines if each.state in _READY)
            there = [process for process in ready if process is not None and process.is_alive]
            return len(there) == num_engines

        if not until(ready, within_s, TICK_S):
            raise ClusterError(
                f"not all of {num_engines} engines came within {within_s:g} s; this host "
                f"may be overloaded\n{said(self.folder)}"
            )
        return ClusterSpec.load(self.folder)  # hosts have come meanwhile, and said what they have

    def submit(self, request: Request) -> int:
        """Queues a job; returns its number.

        Raises:
            ClusterError: it can never fit; the text says what would.
        """
        if (why := refusal(request, self.store.engines())) is not None:
            raise ClusterError(why)
        return self.store.submit(request)

    def refreshed(self, record: JobRecord) -> JobRecord:
        """What is known of a job now; costs next to nothing where there is no news.

        Raises:
            ClusterError: the cluster has ended before the job did.
        """
        if (now := time.monotonic()) - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            if not self.is_kept:
                last = self.store.job(record.id)
                if not last.has_ended:
                    self.require()
                return last
        return self.store.job(record.id) if self.store.changed() else record

    def ask(self, kind: str, job: int | None = None, **payload: object) -> None:
        """Has the job server do something, and waits until it has.

        Raises:
            ClusterError: it refused, or does not answer.
        """
        number = self.store.command(kind, job, **payload)

        def done() -> bool:
            self.require()
            return self.store.command_of(number).done_at is not None

        if not until(done, ANSWER_WITHIN_S, TICK_S):
            raise ClusterError(
                f"the job server of cluster {self.name!r} did not answer within "
                f"{ANSWER_WITHIN_S:g} s ({kind}); its log is in {self.folder}"
            )
        if error := self.store.command_of(number).error:
            raise ClusterError(error)

    def process_of(self, engine: int) -> ProcessIdentity:
        """The process of an engine.

        Raises:
            ClusterError: it has none now.
        """
        process = self.store.engines()[engine].process
        if process is None:
            raise ClusterError(f"engine {engine} has ended, and another is being started")
        return process

    def holders(self, num_engines: int) -> dict[int, str]:
        """For each engine in use, what uses it.

        Args:
            num_engines: how many engines take ranks; the assistant comes after them.
        """
        busy = {
            engine.index: engine.job
            for engine in self.store.engines()[:num_engines]
            if engine.job is not None
        }
        jobs = {number: self.store.job(number) for number in set(busy.values())}
        told = {
            number: f"a run of {job.name}, job {number}" if job.kind == "train" else job.name
            for number, job in jobs.items()
        }
        return {engine: told[number] for engine, number in busy.items()}

    def expect(self, engine: int, is_paused: bool) -> None:
        """Marks an engine as paused or resumed, for the server's detector of hangs."""
        self.store.command("expect_paused", engine=engine, paused=is_paused)

    def leave(self) -> None:
        """Lets go of the cluster; it ends where nobody else is attached, and nothing goes on."""
        with self._guard:
            self._attached[self.folder] -= 1
            if self._attached[self.folder] > 0:
                return
        with suppress(StoreError):  # ended before us, and removed
            jobs = self.store.jobs(states=UNFINISHED)
            others = (owner for owner in self.store.owners() if owner != self.owner)
            if any(job.kind == "train" for job in jobs) or any(each.is_alive for each in others):
                self.store.detach(self.owner)
                return
        # Who gave it a name means to come back.
        self.end(keep_folder=registry.owner_of(self.name) is None)

    def end(self, *, keep_folder: bool = False) -> None:
        """Ends the cluster's processes, now; without `keep_folder` also removes all it knows."""
        with self._guard:
            del self._attached[self.folder]
        if self.is_kept:  # else the next supervisor would take it for its own
            with suppress(StoreError):
                self.store.command("shutdown", remove=not keep_folder)
        self.store.close()
        end(self.folder, keep_folder=keep_folder)
