"""The engines of a cluster, as the job server knows them: who is there, who died, who stands in."""

import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.engine.calls import assume_identity, warm_up
from workbench.hosts.processes import is_alive
from workbench.server.engine_calls import Arrival, EngineCalls
from workbench.server.vitals import out_of_memory_kills
from workbench.store.cluster_spec import EngineDevice
from workbench.store.errors import ClusterError
from workbench.store.record import EngineRecord, EngineState
from workbench.store.store import Store

ASK_EVERY_S = 0.2


class Watch:
    """Tells which of some processes have ended.

    Each is held by a descriptor of its own, so that another process that is given the same id
    later is never taken for it. Where the kernel has none (macOS), it is asked by id.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._held: dict[int, int] = {}  # process id: descriptor; -1: is asked for by id
        self._process: dict[int, int] = {}
        self._ended: set[int] = set()
        self._asked_at = 0.0

    def add(self, pid: int) -> bool:
        """Watches a process; whether it is there."""
        if pid in self._held or pid in self._ended:
            return pid not in self._ended
        if not is_alive(pid):
            return False
        descriptor = -1
        opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
        if opener is not None:
            try:
                descriptor = opener(pid)
            except ProcessLookupError:
                return False
            except OSError:  # a kernel that is too old
                descriptor = -1
        self._held[pid] = descriptor
        if descriptor >= 0:
            self._process[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
        return True

    def wait(self, seconds: float) -> set[int]:
        """The processes that have ended since they were added; waits for the first new one."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(descriptor)
            pid = self._process.pop(descriptor)
            os.close(descriptor)
            del self._held[pid]
            self._ended.add(pid)
        now = time.monotonic()
        if now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            asked = [pid for pid, descriptor in self._held.items() if descriptor < 0]
            self._ended.update(pid for pid in asked if not is_alive(pid))
        return self._ended


# The supervisor, whose children engines are, says how one ended; a moment after the kernel did.
SAID_WITHIN_S = 0.3
POLL_EVERY_S = 0.25


class Fleet:
    """Keeps the store's table of engines and the engines themselves together.

    The supervisor writes which process each engine is, and that it died; the server, by which
    number the controller knows it.

    Args:
        store: the cluster's store.
        engine_calls: the way to call the engines.
        devices: what each engine computes on, by its index.
        replaceable: the engines whose place the assistant can take.
    """

    def __init__(
        self,
        store: Store,
        engine_calls: EngineCalls,
        devices: tuple[EngineDevice, ...],
        replaceable: set[int],
    ) -> None:
        self._store, self._engine_calls, self._devices = store, engine_calls, devices
        self._replaceable = replaceable
        self._watch = Watch()
        self._connection = engine_calls.connection
        self._came: dict[int, Arrival] = {}  # by process
        self._assigned: dict[int, int] = {}  # process: the index that it was told to take
        self._place: dict[int, int] = {}  # of each process
        self._warmed_up: set[int] = set()
        self._died_at: dict[int, float] = {}
        self._short_of_memory: set[int] = set()
        self._oom_kills = out_of_memory_kills()
        self._polled_at = self._asked_at = float("-inf")
        self.records: dict[int, EngineRecord] = {}
        self.died: set[int] = set()

    def wait(self, seconds: float, now: float) -> bool:
        """Returns when a process has ended, or after so many seconds.

        Returns:
            Whether there is news of an engine.
        """
        ended = self._watch.wait(seconds) - self.died
        for pid in ended:
            self._died_at[pid] = now
            if (kills := out_of_memory_kills()) > self._oom_kills:
                self._short_of_memory.add(pid)
                self._oom_kills = kills
        self.died |= ended
        if self._engine_calls.connection != self._connection:
            # Numbers are a controller's own: another may give them to others.
            self._connection = self._engine_calls.connection
            self._came.clear()
            self._assigned.clear()
        arrived = self._engine_calls.arrivals()
        self._came.update({arrival.pid: arrival for arrival in arrived})
        return bool(ended or arrived)

    def read(self, now: float) -> None:
        """Reads what the supervisor wrote, and writes which of its engines can be called."""
        self._polled_at = now
        self.records = {record.index: record for record in self._store.engines()}
        pids = {record.pid for record in self.records.values() if record.pid is not None}
        self._place |= {r.pid: r.index for r in self.records.values() if r.pid is not None}
        self._follow(pids, now)
        for index in list(self.records):
            self._settle(self.records[index])
        self._adopt()

    def follow(self, places: Sequence[int], pids: Sequence[int], now: float) -> None:
        """Watches the processes of a job's ranks: others may be those engines by now."""
        for place, pid in zip(places, pids, strict=False):
            self._place.setdefault(pid, place)
        self._follow(pids, now)

    def _follow(self, pids: Iterable[int], now: float) -> None:
        for pid in pids:
            if pid not in self.died and not self._watch.add(pid):
                self.died.add(pid)
                self._died_at[pid] = now

    def is_due(self, now: float) -> bool:
        """Whether to read again, as somebody is missing."""
        if now - max(self._polled_at, self._asked_at) < POLL_EVERY_S:
            return False
        self._asked_at = now
        return not self.records or any(
            not self.lives(record) or (record.state == "idle" and not self.is_ready(index))
            for index, record in self.records.items()
        )

    def lives(self, record: EngineRecord) -> bool:
        """Whether an engine has come, and has not ended."""
        return record.state in ("idle", "busy", "paused") and record.pid not in self.died

    def is_ready(self, index: int) -> bool:
        """Whether an engine lives and can be called.

        One that works when we come, or when another controller does, says who it is after that.
        """
        record = self.records.get(index)
        if record is None or record.pid is None or not self.lives(record):
            return False
        came = self._came.get(record.pid)
        return came is not None and came.engine_id == record.engine_id

    def living(self) -> list[EngineRecord]:
        """Those that have come, and have not ended."""
        return [record for _, record in sorted(self.records.items()) if self.lives(record)]

    def for_scheduling(self) -> list[EngineRecord]:
        """All engines; those that cannot be called now count as dead, whatever was said so far."""
        return [
            record
            if record.state == "starting"
            or (self.lives(record) and record.state != "idle")
            or self.is_ready(index)
            else replace(record, state="dead")
            for index, record in sorted(self.records.items())
        ]

    def pids(self, places: Iterable[int]) -> tuple[int, ...]:
        """The processes of engines that are ready."""
        return tuple(self.records[place].pid or 0 for place in places)

    def how(self, pid: int, now: float) -> str | None:
        """In words, how a process ended; None: the supervisor will say in a moment."""
        record = self.records.get(self._place.get(pid, -1))
        # One that was replaced already is what the record calls its last process.
        is_told = record is not None and (record.pid != pid or record.state == "dead")
        said = record.death if record is not None and is_told else ""
        if not said and now - self._died_at.get(pid, now) < SAID_WITHIN_S:
            return None
        said = said or "ended"
        if pid in self._short_of_memory:
            return f"{said}: memory ran out, as the kernel's counter of such kills says"
        return said

    def is_lost(self, pid: int, error: Exception) -> bool:
        """Whether a call failed because its engine ended; that is told by its process."""
        return pid in self.died or getattr(error, "ename", type(error).__name__) == "EngineError"

    def moved(self, places: Sequence[int], missing: Collection[int]) -> tuple[int, ...] | None:
        """Places with idle engines like them where engines are missing; None: there are too few.

        Args:
            places: an engine for each rank.
            missing: the places whose engines are missing.
        """
        idle = [
            index
            for index, record in sorted(self.records.items())
            if record.state == "idle" and not record.is_assistant and self.is_ready(index)
        ]
        found: list[int] = []
        for place in places:
            alike = [index for index in idle if self._are_alike(place, index)]
            if place in missing and not alike:
                return None
            found.append(alike[0] if place in missing else place)
            idle = [index for index in idle if index != found[-1]]
        return tuple(found)

    def _are_alike(self, one: int, other: int) -> bool:
        """Whether two engines of this host have devices of one kind."""
        kinds = {
            (device.kind, device.name, device.threads, device.memory_bytes)
            for device in (self._devices[one], self._devices[other])
        }
        return len(kinds) == 1 and {one, other} <= self._replaceable

    def replace_with_spare(self, missing: int) -> bool:
        """Has the assistant take the place of an engine that died; whether it will.

        Who was started in the dead one's place becomes the assistant when it comes.
        """
        spare = next((r for r in self.records.values() if r.is_assistant), None)
        gone = self.records.get(missing)
        if (
            spare is None
            or gone is None
            or missing not in self._replaceable
            or gone.state != "starting"  # the supervisor is about to write who was started for it
            or gone.pid in self.died
            or missing in self._assigned.values()
            or spare.job is not None
            or spare.state != "idle"
            or not self.is_ready(spare.index)
        ):
            return False
        came = self._came.get(spare.pid or 0)
        return came is not None and self._tell(came, missing)

    def prepare_spare(self) -> None:
        """Has the assistant make itself ready to take another's place; each one does so once."""
        spare = next((r for r in self.records.values() if r.is_assistant), None)
        if spare is None or spare.state != "idle" or not self.is_ready(spare.index):
            return
        came = self._came[spare.pid or 0]
        if came.pid not in self._warmed_up:
            self._warmed_up.add(came.pid)
            with suppress(ClusterError):  # it is gone again
                self._engine_calls.call(came.engine_id, warm_up)

    def _tell(self, engine: Arrival, index: int) -> bool:
        """Has an engine become another."""
        device = self._devices[index]
        arguments = (index, device.cores, device.threads, {"CUDA_VISIBLE_DEVICES": device.gpu})
        try:
            self._engine_calls.assume_identity(engine.engine_id, assume_identity, *arguments)
        except ClusterError:
            return False
        self._assigned[engine.pid] = index
        return True

    def _settle(self, record: EngineRecord) -> None:
        """Writes what is known of an engine that has come, or has become another.

        The store says which process is which engine. Where a process reports another index, the
        store wins, and the process is told its index; but not for a spare just swapped in, which
        the store does not know under its new index yet.
        """
        came = self._came.get(record.pid) if record.pid is not None else None
        if came is None or record.pid in self.died:
            return
        told = self._assigned.get(came.pid)
        if told is None and came.index != record.index:
            self._tell(came, record.index)
        elif told is not None and came.index != told:
            return  # it was told and has not yet
        elif told is not None and told != record.index:
            self._exchange(record, self.records[told], came)
        elif record.state == "starting" or record.engine_id != came.engine_id:
            self._set(record.index, came, record.job)

    def _exchange(self, spare: EngineRecord, gone: EngineRecord, came: Arrival) -> None:
        """The assistant is now the engine that died; whoever was to replace that, the assistant.

        The first change alone leaves both with one process; then the assistant, which is in
        neither, is taken for what it says that it is.
        """
        state = gone.state if gone.state == "dead" else "starting"
        self._store.set_engine(spare.index, pid=gone.pid, engine_id=None, state=state)
        self._set(gone.index, came, gone.job)
        self._store.event(
            f"the assistant took the place of engine {gone.index}",
            kind="replaced",
            job=gone.job,
            engine=gone.index,
        )

    def _adopt(self) -> None:
        """Registers unknown processes under the index they report, if it has no live engine."""
        known = {record.pid for record in self.records.values()}
        for came in list(self._came.values()):
            record = self.records.get(came.index)
            if came.pid in known or came.pid in self.died or record is None:
                continue
            if not self.is_ready(came.index) and self._watch.add(came.pid):
                self._set(came.index, came, record.job)

    def _set(self, index: int, came: Arrival, job: int | None) -> None:
        state: EngineState = "idle" if job is None else "busy"
        self._store.set_engine(index, pid=came.pid, engine_id=came.engine_id, state=state)
        self._assigned.pop(came.pid, None)
        self.records = {record.index: record for record in self._store.engines()}
