"""Watches what runs: processes that stand still, slow ranks, and what the host has left.

Ranks that were stopped by a signal are found soon, with few looks at each:

    every 0.25 s     the sizes of all ranks' files of rows: who reports works
    every 0.5 s      the kernel's word on those who do not report; at once on who has just ceased to
    every 0.1 s      that on those who are stopped, until they have been so for long enough

So a rank that reports often costs one look at a size, and one that is stopped for as long as
somebody may be is found 0.5 + 0.1 s later, and the time that the server's own turns take. It is
told of first, and ended where it has not gone on when its lease is over: whoever suspends a host
for a moment loses nothing. A host that is busy stops nobody: however slow it is, its processes wait
for the processor, which is another state.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from workbench.plan.experiment.metrics import Row
from workbench.server.attempt import Attempt, Rank
from workbench.server.fleet import Fleet
from workbench.server.job import Work
from workbench.server.vitals import Vitals
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.store import Store

SIZES_EVERY_S, STOPPED_EVERY_S = 0.25, 0.1

Place = tuple[Work, Attempt, Rank]


class Standstill:
    """Looks at ranks again and again.

    Args:
        after_s: the seconds from which on one that is stopped, and does not work in between,
            stands still.
    """

    def __init__(self, vitals: Vitals, after_s: float) -> None:
        self._vitals, self._after_s = vitals, after_s
        self._silent: set[int] = set()  # processes that did not report before the last look
        self._stopped: list[Place] = []
        self._turn = 0
        self._sizes_at = self._stopped_at = float("-inf")

    def poll(self, running: Iterable[tuple[Work, Attempt]], now: float) -> Iterator[Place]:
        """The ranks that stand still, each again and again until it has ended.

        Args:
            running: the jobs that run, with their attempts.
        """
        if now - self._sizes_at >= SIZES_EVERY_S:
            self._sizes_at = now
            self._poll_all([(work, a, rank) for work, a in running for rank in a.ranks], now)
        if self._stopped and now - self._stopped_at >= STOPPED_EVERY_S:
            self._stopped_at = now
            for work, attempt, rank in self._stopped:
                self._vitals.poll(rank.pid, now)
                if self._vitals.stopped_s(rank.pid, now) >= self._after_s and not rank.has_ended:
                    yield work, attempt, rank

    def _poll_all(self, places: list[Place], now: float) -> None:
        self._turn += 1
        silent = set()
        for _, _, rank in places:
            if rank.has_ended:
                continue
            if rank.has_reported():
                self._vitals.works(rank.pid)
                continue
            silent.add(rank.pid)
            if rank.pid not in self._silent or (self._turn + rank.number) % 2:
                self._vitals.poll(rank.pid, now)
        self._silent = silent
        self._stopped = [
            place
            for place in places
            if place[2].pid in silent and self._vitals.is_stopped(place[2].pid)
        ]


class Gpus:
    """Memory in use on this host's GPUs."""

    def __init__(self) -> None:
        self._library: Any = None
        with suppress(Exception):  # no driver, or no GPU: there is nothing to say
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml

    def bytes_of(self, gpu: str) -> int:
        """Memory that is in use on a GPU.

        Args:
            gpu: the GPU's number or UUID; "" for none.
        """
        if self._library is None or not gpu:
            return 0
        with suppress(Exception):  # it fell off the bus, or is somebody else's
            by_index, by_uuid = (
                self._library.nvmlDeviceGetHandleByIndex,
                self._library.nvmlDeviceGetHandleByUUID,
            )
            handle = by_index(int(gpu)) if gpu.isdecimal() else by_uuid(gpu)
            return int(self._library.nvmlDeviceGetMemoryInfo(handle).used)
        return 0


@dataclass
class HostHealth:
    """Looks at the host again and again; rates are those since the last look."""

    _at: float | None = None
    _traffic: dict[str, tuple[int, int]] = field(default_factory=dict)

    def poll(self, now: float) -> dict[str, object]:
        """Processor, memory and network, as plain values.

        Returns:
            time: seconds since the epoch; cpu_share: of all cores; free_bytes and bytes: of
            memory; network: by interface, bytes received and sent in a second ({} at first).
        """
        memory = psutil.virtual_memory()
        return {
            "time": time.time(),
            "cpu_share": psutil.cpu_percent() / 100,
            "free_bytes": memory.available,
            "bytes": memory.total,
            "network": self._rates(now),
        }

    def _rates(self, now: float) -> dict[str, tuple[float, float]]:
        counters = psutil.net_io_counters(pernic=True)
        traffic = {name: (each.bytes_recv, each.bytes_sent) for name, each in counters.items()}
        before, passed = self._traffic, now - (now if self._at is None else self._at)
        self._at, self._traffic = now, traffic
        if passed <= 0:
            return {}
        return {
            # A counter that is smaller than before began anew, as its interface did.
            name: (
                max(received - before[name][0], 0) / passed,
                max(sent - before[name][1], 0) / passed,
            )
            for name, (received, sent) in traffic.items()
            if name in before
        }


IDLE_EVERY_S, ROWS_EVERY_S = 0.25, 1.0
HEALTH_EVERY_S = 10.0
# A rank waits for others no longer than the time-out, and then reports who did not come. One that
# is silent for 3 time-outs and for 20 of its longest steps is hung, and is killed; but not while it
# says that it waits for a disk: slow is not dead.
SILENT_TIMEOUTS, SILENT_STEPS = 3.0, 20.0
# Who looks so seldom was stopped, as all were perhaps: by `scontrol suspend`.
OWN_GAP_S = 2.0


class Monitor:
    """Looks at what runs, each thing as often as it needs.

    Args:
        store: the cluster's store, which takes events and the engines' health.
    """

    def __init__(self, folder: Path, store: Store, spec: ClusterSpec, fleet: Fleet) -> None:
        self._store, self._spec, self._fleet = store, spec, fleet
        self._vitals, self._gpus = Vitals(folder), Gpus()
        after_s = min(spec.suspicion_s, spec.lease_s)
        self._standstill, self._host = Standstill(self._vitals, after_s), HostHealth()
        self._suspected: dict[int, Place] = {}  # by process
        self._due: dict[Callable[..., None], float] = {}
        self._polled_at = math.inf

    def poll(self, works: Iterable[Work], now: float) -> None:
        """Does what is due."""
        running = [(work, work.attempt) for work in works if work.attempt is not None]
        self._excuse(running, now)
        self._end_stopped(running, now)
        self._at(self._end_stopped_idle, IDLE_EVERY_S, running, now)
        self._at(self._poll_rows, ROWS_EVERY_S, running, now)
        self._at(self._poll_engines, HEALTH_EVERY_S, running, now)

    def _excuse(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Does not count against anybody the time in which this process stood still itself."""
        gap = now - self._polled_at
        self._polled_at = now
        if gap > OWN_GAP_S:
            self._vitals.excuse(gap)
            for work, _ in running:
                work.moved_at += gap

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
        """Ends ranks that were stopped by a signal for too long, unless somebody said so."""
        for pid, (work, _, rank) in list(self._suspected.items()):
            if rank.has_ended or not self._vitals.is_stopped(pid):
                del self._suspected[pid]
                if not rank.has_ended:
                    self._tell(work, f"rank {rank.number} goes on", "stopped", rank.place)
        for work, attempt, rank in self._standstill.poll(running, now):
            if rank.killed or self._fleet.records[rank.place].state == "paused":
                continue
            stopped_s, lease_s = self._vitals.stopped_s(rank.pid, now), self._spec.lease_s
            if stopped_s < lease_s:
                if rank.pid not in self._suspected:
                    self._suspected[rank.pid] = (work, attempt, rank)
                    why = "stands still, stopped by a signal; it is ended if that lasts"
                    text = f"rank {rank.number} {why} {lease_s:g} s"
                    self._tell(work, text, "stopped", rank.place)
                continue
            why = f"stood still for {stopped_s:.1f} s, stopped by a signal, and was ended"
            self._tell(work, f"rank {rank.number} {why}", "stopped", rank.place)
            attempt.kill(rank, why)

    def _end_stopped_idle(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """The same of engines that have no rank: the next job would lose its first attempt."""
        at_work = {rank.pid for _, attempt in running for rank in attempt.ranks}
        for engine in self._fleet.living():
            if engine.process is None or engine.state == "paused":
                continue
            if (pid := engine.process.pid) in at_work:
                continue
            self._vitals.poll(pid, now)
            if (stopped_s := self._vitals.stopped_s(pid, now)) >= self._spec.lease_s:
                text = f"engine {engine.index} stood still for {stopped_s:.1f} s, stopped by a "
                text += "signal while it had nothing to do, and was ended"
                self._store.event(text, kind="stopped", level="warning", engine=engine.index)
                engine.process.send(signal.SIGKILL)

    def _poll_rows(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Follows training: how far it is, how fast, and who is behind."""
        for work, attempt in running:
            if work.record.kind != "train":
                continue
            newest: dict[int, Row] = {}
            for rank in attempt.ranks:
                if (row := rank.last_row()) is not None:
                    newest[rank.number] = row
            before = work.pace.step
            for text in work.pace.poll(newest):
                self._tell(work, text, "slow")
            for text in work.memory.poll(newest, work.resumed):
                self._tell(work, text, "memory")
            if work.pace.step != before:
                work.moved_at = now
            elif newest and now - work.moved_at > self._patience_s(work):
                renewed_at = max(rank.files.renewed_at for rank in attempt.ranks)
                if time.time() - renewed_at > SILENT_TIMEOUTS * self._spec.timeout_s:
                    self._end_silent(work, attempt, now)
            if work.step != work.written_step:
                work.written_step = work.step
                self._store.update(work.record.id, step=work.step)

    def _patience_s(self, work: Work) -> float:
        timeouts, steps = SILENT_TIMEOUTS * self._spec.timeout_s, SILENT_STEPS
        return max(timeouts, steps * work.pace.longest_gap_s)

    def _end_silent(self, work: Work, attempt: Attempt, now: float) -> None:
        why = f"made no step for {now - work.moved_at:.0f} s and was ended"
        for rank in attempt.ranks:
            if rank.has_begun and not rank.has_ended and not rank.killed:
                self._tell(work, f"rank {rank.number} {why}", "silent", rank.place)
                attempt.kill(rank, why)

    def _poll_engines(self, running: list[tuple[Work, Attempt]], now: float) -> None:
        """Writes down how engines and host do."""
        health = {}
        for engine in self._fleet.living():
            pid = engine.pid
            assert pid is not None
            device = self._spec.devices[engine.index]
            is_elsewhere = bool(self._spec.sites[engine.index].enter)
            self._vitals.poll(pid, now)
            health[engine.index] = (
                round(self._vitals.cpu_share(pid), 3),
                self._vitals.rss_bytes(pid),
                self._gpus.bytes_of("" if is_elsewhere else device.gpu),
            )
        self._store.note_health(health)
        for process in self._fleet.died:
            self._vitals.drop(process.pid)
        self._store.set_meta("host", json.dumps(self._host.poll(now)))

    def _tell(self, work: Work, text: str, kind: str, engine: int | None = None) -> None:
        self._store.event(text, kind=kind, level="warning", job=work.record.id, engine=engine)
