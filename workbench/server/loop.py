"""The job server's loop: looks, decides, acts; and waits for whatever comes first."""

import logging
import time
from pathlib import Path

from workbench.server.commands import Commands
from workbench.server.engine_calls import EngineCalls
from workbench.server.fleet import Fleet
from workbench.server.job import Work
from workbench.server.job_runner import InitialWeights, JobRunner
from workbench.server.monitor import Monitor
from workbench.server.queue import Queue
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.errors import StoreError
from workbench.store.record import ACTIVE
from workbench.store.store import Store

# Between looks at what nobody tells of: as long as all runs, and where something begins or ends.
QUIET_S, BUSY_S = 0.1, 0.02
# What nobody tells of is asked for so often: owners that are gone, time that has passed.
SETTLE_EVERY_S = 2.0
AGAIN_S = 1.0

log = logging.getLogger(__name__)


class Server:
    """The job server of one cluster; keeps nothing that is not in the store or in files."""

    def __init__(
        self, folder: Path, spec: ClusterSpec, store: Store, engine_calls: EngineCalls
    ) -> None:
        self._store, self._engine_calls = store, engine_calls
        self._fleet = Fleet(store, engine_calls)
        self._weights = InitialWeights(store, folder, spec.num_engines)
        self._runner = JobRunner(folder, store, spec, self._fleet, engine_calls, self._weights)
        self._commands = Commands(store)
        self._queue = Queue(store, self._fleet, self._commands)
        self._monitor = Monitor(folder, store, spec, self._fleet)
        self._works: dict[int, Work] = {}
        self._settled_at = float("-inf")

    def run(self) -> None:
        """Serves until this process is ended; there is nothing to be done at its end."""
        while True:
            try:
                self.tick(time.monotonic(), BUSY_S if self._is_busy() else QUIET_S)
            except (StoreError, OSError) as error:  # a full disk, or one that is slow: once more
                log.warning("%s", error)
                time.sleep(AGAIN_S)

    def tick(self, now: float, wait_s: float = BUSY_S) -> None:
        """One look at everything."""
        is_news = self._fleet.wait(wait_s, now)
        if self._store.changed() or is_news or self._fleet.is_due(now):
            is_news = True
            self._commands.carry_out()
        is_due = now - self._settled_at >= SETTLE_EVERY_S
        if is_news or is_due:
            self._fleet.read(now)
            self._take_up(now)
        self._hear()
        ended = [job for job, work in self._works.items() if not self._advance(work, now)]
        for job in ended:
            del self._works[job]
        if is_news or is_due or ended or self._weights.were_asked_for():
            self._settled_at = now
            if ended:
                self._fleet.read(now)
            if self._queue.settle(time.time()):
                self._fleet.read(now)
                self._take_up(now)
        self._monitor.poll(self._works.values(), now)

    def _advance(self, work: Work, now: float) -> bool:
        """Does what is due for one job, whose errors are its own; whether it holds engines."""
        try:
            holds = self._runner.advance(work, now)
        except StoreError:
            raise
        except Exception as error:
            return self._runner.bear(work, error, now)
        work.ails_since = None
        return holds

    def _is_busy(self) -> bool:
        return any(work.record.state != "running" for work in self._works.values())

    def _take_up(self, now: float) -> None:
        """Takes up all jobs that hold engines, whichever server gave them those."""
        active = {record.id: record for record in self._store.jobs(states=ACTIVE)}
        for job in self._works.keys() - active.keys():
            del self._works[job]
        for job, record in active.items():
            self._fleet.follow(record.held, record.processes, now)
            if job in self._works:
                self._works[job].record = record
            else:
                self._works[job] = Work.of(record, now)

    def _hear(self) -> None:
        """Calls that could not be delivered, or whose rank could not answer."""
        for refusal in self._engine_calls.refusals():
            log.warning("%s: %r", refusal.tag, refusal.error)
            if isinstance(refusal.tag, tuple):
                job, attempt, rank = refusal.tag
                work = self._works.get(job)
                if work is not None and work.attempt and work.attempt.number == attempt:
                    if not self._fleet.is_lost(work.attempt.ranks[rank].process, refusal.error):
                        work.attempt.refuse(rank, refusal.error)
