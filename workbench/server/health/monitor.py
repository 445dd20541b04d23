"""Watches what runs: processes that stand still, slow ranks, and what the host has left."""

import json
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from workbench.plan.metrics import Row
from workbench.server.attempt import Attempt
from workbench.server.fleet import Fleet
from workbench.server.health.hosts import Gpus, HostHealth
from workbench.server.health.standstill import STOPPED_S, Standstill
from workbench.server.health.vitals import Vitals
from workbench.server.work import Work
from workbench.store.cluster_spec import Spec
from workbench.store.store import Store

IDLE_EVERY_S, ROWS_EVERY_S, KEPT_EVERY_S = 0.25, 1.0, 5.0
HEALTH_EVERY_S = 10.0
BACKUP_EVERY_S = 3600.0
# Ranks wait for each other no longer than their time-out, and then say who did not come. Who says
# nothing for much longer than that, and than any step took, says nothing any more.
SILENT_TIMEOUTS, SILENT_STEPS = 3.0, 20.0


class Monitor:
    """Looks at what runs, each thing as often as it needs.

    Args:
        folder: of the cluster.
        store: takes metrics, events and the engines' health.
        spec: of the cluster.
        fleet: its engines.
    """

    def __init__(self, folder: Path, store: Store, spec: Spec, fleet: Fleet) -> None:
        self._store, self._spec, self._fleet = store, spec, fleet
        self._vitals, self._gpus = Vitals(folder), Gpus()
        self._standstill, self._host = Standstill(self._vitals), HostHealth()
        self._due: dict[Callable[..., None], float] = {}

    def look(self, works: Iterable[Work], now: float) -> None:
        """Does what is due.

        Args:
            works: jobs that hold engines.
            now: a monotonic clock's seconds.
        """
        running = [(work, work.attempt) for work in works if work.attempt is not None]
        self._end_stopped(running, now)
        self._at(self._end_stopped_idle, IDLE_EVERY_S, running, now)
        self._at(self._look_at_rows, ROWS_EVERY_S, running, now)
        self._at(self._keep_rows, KEPT_EVERY_S, running, now)
        self._at(self._look_at_engines, HEALTH_EVERY_S, running, now)

    def _at(
        self,
        what: Callable[[list[tuple[Work, Attempt]], float], None],
        every_s: float,
        running: list[tuple[Work, Attempt]],
        now: float,
    ) -> None:
        if now >= self._due.get(what, now):
            self._due[what] = now + every_s
            what(running, now)

    def _end_stopped(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Ends ranks that were stopped by a signal, unless somebody said so."""
        for work, attempt, rank in self._standstill.look(running, now):
            if rank.killed or self._fleet.records[rank.place].state == "paused":
                continue
            stopped_s = self._vitals.stopped_s(rank.pid, now)
            why = f"stood still for {stopped_s:.1f} s, stopped by a signal, and was ended"
            self._tell(work, f"rank {rank.number} {why}", "stopped", rank.place)
            attempt.kill(rank, why)

    def _end_stopped_idle(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """The same of engines that have no rank: the next job would lose its first attempt."""
        at_work = {rank.pid for _, attempt in running for rank in attempt.ranks}
        for engine in self._fleet.living():
            pid = engine.pid
            if pid is None or pid in at_work or engine.state == "paused":
                continue
            self._vitals.look(pid, now)
            if (stopped_s := self._vitals.stopped_s(pid, now)) >= STOPPED_S:
                text = f"engine {engine.index} stood still for {stopped_s:.1f} s, stopped by a "
                text += "signal while it had nothing to do, and was ended"
                self._store.event(text, kind="stopped", level="warning", engine=engine.index)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _look_at_rows(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Follows training: how far it is, how fast, and who is behind."""
        for work, attempt in running:
            if work.record.kind != "train":
                continue
            newest: dict[int, Row] = {}
            for rank in attempt.ranks:
                if (row := rank.last_row()) is not None:
                    newest[rank.number] = row
            before = work.pace.step
            for text in work.pace.look(newest):
                self._tell(work, text, "slow")
            for text in work.memory.look(newest, work.resumed):
                self._tell(work, text, "memory")
            if work.pace.step != before:
                work.moved_at = now
            elif newest and now - work.moved_at > self._patience_s(work):
                self._end_silent(work, attempt, now)
            if work.step != work.written_step:
                work.written_step = work.step
                self._store.update(work.record.id, step=work.step)

    def _keep_rows(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Takes the newest rows of what trains into the store; ranks' files have all of them."""
        for work, attempt in running:
            if work.moved_at > work.kept_at:
                work.kept_at = now
                packed = [rank.last_packed() for rank in attempt.ranks]
                self._store.add_rows(work.record.id, b"".join(packed))

    def _patience_s(self, work: Work) -> float:
        timeouts, steps = SILENT_TIMEOUTS * self._spec.timeout_s, SILENT_STEPS
        return max(timeouts, steps * work.pace.longest_gap_s)

    def _end_silent(self, work: Work, attempt: Attempt, now: float) -> None:
        why = f"made no step for {now - work.moved_at:.0f} s and was ended"
        for rank in attempt.ranks:
            if rank.has_begun and not rank.has_ended and not rank.killed:
                self._tell(work, f"rank {rank.number} {why}", "silent", rank.place)
                attempt.kill(rank, why)

    def _look_at_engines(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Writes down how engines and host do."""
        health = {}
        for engine in self._fleet.living():
            pid = engine.pid
            assert pid is not None
            device = self._spec.devices[engine.index]
            is_elsewhere = bool(self._spec.sites[engine.index].enter)
            self._vitals.look(pid, now)
            health[engine.index] = (
                round(self._vitals.cpu_share(pid), 3),
                self._vitals.rss_bytes(pid),
                self._gpus.bytes_of("" if is_elsewhere else device.gpu),
            )
        self._store.note_health(health)
        for pid in self._fleet.died:
            self._vitals.drop(pid)
        self._store.set_meta("host", json.dumps(self._host.look(now)))
        self._store.backup(every_s=BACKUP_EVERY_S)

    def _tell(self, work: Work, text: str, kind: str, engine: int | None = None) -> None:
        self._store.event(text, kind=kind, level="warning", job=work.record.id, engine=engine)
