"""The engines of a cluster, as the job server knows them: who is there, who died, who stands in."""

import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.engine.calls import assume_identity
from workbench.server.engine_calls import Arrival, EngineCalls
from workbench.server.vitals import out_of_memory_kills
from workbench.store.cluster_spec import EngineDevice
from workbench.store.errors import ClusterError
from workbench.store.process import ProcessIdentity
from workbench.store.record import EngineRecord, EngineState, ErrorRecord, JobRecord
from workbench.store.store import Store

ASK_EVERY_S = 0.2


class Watch:
    """Tells which of some processes have ended.

    Each is held by a descriptor of its own, so that another process that is given the same id
    later is never taken for it. Where the kernel has none (macOS), it is asked again and again.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._held: dict[ProcessIdentity, int] = {}  # its descriptor; -1: it is asked for
        self._process: dict[int, ProcessIdentity] = {}
        self._ended: set[ProcessIdentity] = set()
        self._asked_at = 0.0

    def add(self, process: ProcessIdentity) -> bool:
        """Watches a process; whether it is there."""
        if process in self._held or process in self._ended:
            return process not in self._ended
        descriptor = -1
        opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
        if opener is not None and process.is_near:
            # A kernel that is too old has none; of one that is gone, the next question tells.
            with suppress(OSError):
                descriptor = opener(process.pid)
        if not process.is_alive:  # asked once it is held: from here on it is no other
            if descriptor >= 0:
                os.close(descriptor)
            return False
        self._held[process] = descriptor
        if descriptor >= 0:
            self._process[descriptor] = process
            self._poll.register(descriptor, select.POLLIN)
        return True

    def wait(self, seconds: float) -> set[ProcessIdentity]:
        """The processes that have ended since they were added; waits for the first new one."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(descriptor)
            process = self._process.pop(descriptor)
            os.close(descriptor)
            del self._held[process]
            self._ended.add(process)
        now = time.monotonic()
        if now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            asked = [process for process, descriptor in self._held.items() if descriptor < 0]
            self._ended.update(process for process in asked if not process.is_alive)
        return self._ended


# The supervisor, whose children engines are, says how one ended; a moment after the kernel did.
SAID_WITHIN_S = 0.3
POLL_EVERY_S = 0.25
# The supervisor starts another sooner, unless it has given up.
NOBODY_COMES_AFTER_S = 15.0


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
        self._came: dict[ProcessIdentity, Arrival] = {}
        self._assigned: dict[ProcessIdentity, int] = {}  # the index that it was told to take
        self._place: dict[ProcessIdentity, int] = {}
        self._died_at: dict[ProcessIdentity, float] = {}
        self._dead_since: dict[int, float] = {}
        self._short_of_memory: set[ProcessIdentity] = set()
        self._oom_kills = out_of_memory_kills()
        self._polled_at = self._asked_at = float("-inf")
        self.records: dict[int, EngineRecord] = {}
        self.died: set[ProcessIdentity] = set()

    def wait(self, seconds: float, now: float) -> bool:
        """Returns when a process has ended, or after so many seconds.

        Returns:
            Whether there is news of an engine.
        """
        ended = self._watch.wait(seconds) - self.died
        for process in ended:
            self._died_at[process] = now
            if (kills := out_of_memory_kills()) > self._oom_kills:
                self._short_of_memory.add(process)
                self._oom_kills = kills
        self.died |= ended
        if self._engine_calls.connection != self._connection:
            # Numbers are a controller's own: another may give them to others.
            self._connection = self._engine_calls.connection
            self._came.clear()
            self._assigned.clear()
        arrived = self._engine_calls.arrivals()
        for arrival in arrived:
            with suppress(ProcessLookupError):  # it is gone again
                self._came[ProcessIdentity.of(arrival.pid)] = arrival
        return bool(ended or arrived)

    def read(self, now: float) -> None:
        """Reads what the supervisor wrote, and writes which of its engines can be called."""
        self._polled_at = now
        self.records = {record.index: record for record in self._store.engines()}
        known = {r.process: r.index for r in self.records.values() if r.process is not None}
        self._place |= known
        dead = [index for index, record in self.records.items() if record.state == "dead"]
        self._dead_since = {index: self._dead_since.get(index, now) for index in dead}
        self._follow(known, now)
        for index in list(self.records):
            self._settle(self.records[index])
        self._adopt()

    def follow(
        self, places: Sequence[int], processes: Sequence[ProcessIdentity], now: float
    ) -> None:
        """Watches the processes of a job's ranks: others may be those engines by now."""
        for place, process in zip(places, processes, strict=False):
            self._place.setdefault(process, place)
        self._follow(processes, now)

    def _follow(self, processes: Iterable[ProcessIdentity], now: float) -> None:
        for process in processes:
            if process not in self.died and not self._watch.add(process):
                self.died.add(process)
                self._died_at[process] = now

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
        return record.state in ("idle", "busy", "paused") and record.process not in self.died

    def is_ready(self, index: int) -> bool:
        """Whether an engine lives and can be called.

        One that works when we come, or when another controller does, says who it is after that.
        """
        record = self.records.get(index)
        if record is None or record.process is None or not self.lives(record):
            return False
        came = self._came.get(record.process)
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

    def processes(self, places: Iterable[int]) -> tuple[ProcessIdentity, ...]:
        """The processes of engines that are ready."""
        found = (self.records[place].process for place in places)
        return tuple(process for process in found if process is not None)

    def how(self, process: ProcessIdentity, now: float) -> str | None:
        """In words, how a process ended; None: the supervisor will say in a moment."""
        record = self.records.get(self._place.get(process, -1))
        # One that was replaced already is what the record calls its last process.
        is_told = record is not None and (record.process != process or record.state == "dead")
        said = record.death if record is not None and is_told else ""
        if not said and now - self._died_at.get(process, now) < SAID_WITHIN_S:
            return None
        said = said or "ended"
        if process in self._short_of_memory:
            return f"{said}: memory ran out, as the kernel's counter of such kills says"
        return said

    def loss(self, job: JobRecord) -> ErrorRecord | None:
        """Why a job cannot begin on the engines that it names; None: it can, now or soon."""
        for rank, place in enumerate(job.places or ()):
            since = self._dead_since.get(place, self._polled_at)
            if self._polled_at - since > NOBODY_COMES_AFTER_S:
                death = self.records[place].death
                text = f"engine {place}, of rank {rank}, {death}, and no other came in its place"
                return ErrorRecord("EngineDied", text, rank, death=death)
        return None

    def is_lost(self, process: ProcessIdentity, error: Exception) -> bool:
        """Whether a call failed because its engine ended; that is told by its process."""
        return (
            process in self.died or getattr(error, "ename", type(error).__name__) == "EngineError"
        )

    def moved(self, places: Sequence[int], missing: Collection[int]) -> tuple[int, ...] | None:
        """Places with idle engines like them where engines are missing; None: there are too few.

        Args:
            places: an engine for each rank.
            missing: the places whose engines are missing.
        """
        idle, found = self.idle(), list[int]()
        for place in places:
            alike = [index for index in idle if self._are_alike(place, index)]
            if place in missing and not alike:
                return None
            found.append(alike[0] if place in missing else place)
            idle = [index for index in idle if index != found[-1]]
        return tuple(found)

    def idle(self) -> list[int]:
        """The engines that take ranks and have none, and that could be called now."""
        return [
            index
            for index, record in sorted(self.records.items())
            if record.state == "idle" and not record.is_assistant and self.is_ready(index)
        ]

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
            or gone.process in self.died
            or missing in self._assigned.values()
            or spare.job is not None
            or spare.state != "idle"
            or not self.is_ready(spare.index)
        ):
            return False
        process = spare.process
        return process in self._came and self._tell(process, missing)

    def _tell(self, process: ProcessIdentity, index: int) -> bool:
        """Has an engine become another."""
        device = self._devices[index]
        arguments = (index, device.cores, device.threads, {"CUDA_VISIBLE_DEVICES": device.gpu})
        try:
            engine_id = self._came[process].engine_id
            self._engine_calls.assume_identity(engine_id, assume_identity, *arguments)
        except ClusterError:
            return False
        self._assigned[process] = index
        return True

    def _settle(self, record: EngineRecord) -> None:
        """Writes what is known of an engine that has come, or has become another.

        The store says which process is which engine. Where a process reports another index, the
        store wins, and the process is told its index; but not for a spare just swapped in, which
        the store does not know under its new index yet.
        """
        process = record.process
        if process is None or process not in self._came or process in self.died:
            return
        came, told = self._came[process], self._assigned.get(process)
        if told is None and came.index != record.index:
            self._tell(process, record.index)
        elif told is not None and came.index != told:
            return  # it was told and has not yet
        elif told is not None and told != record.index:
            self._exchange(record, self.records[told], process)
        elif record.state == "starting" or record.engine_id != came.engine_id:
            self._set(record.index, process, record.job)

    def _exchange(self, spare: EngineRecord, gone: EngineRecord, process: ProcessIdentity) -> None:
        """The assistant is now the engine that died; whoever was to replace that, the assistant.

        The first change alone leaves both with one process; then the assistant, which is in
        neither, is taken for what it says that it is.
        """
        state = gone.state if gone.state == "dead" else "starting"
        self._store.set_engine(spare.index, process=gone.process, engine_id=None, state=state)
        self._set(gone.index, process, gone.job)
        self._store.event(
            f"the assistant took the place of engine {gone.index}",
            kind="replaced",
            job=gone.job,
            engine=gone.index,
        )

    def _adopt(self) -> None:
        """Registers unknown processes under the index they report, if it has no live engine."""
        known = {record.process for record in self.records.values()}
        for process, came in list(self._came.items()):
            record = self.records.get(came.index)
            if process in known or process in self.died or record is None:
                continue
            if not self.is_ready(came.index) and self._watch.add(process):
                self._set(came.index, process, record.job)

    def _set(self, index: int, process: ProcessIdentity, job: int | None) -> None:
        state: EngineState = "idle" if job is None else "busy"
        engine_id = self._came[process].engine_id
        self._store.set_engine(index, process=process, engine_id=engine_id, state=state)
        self._assigned.pop(process, None)
        self.records = {record.index: record for record in self._store.engines()}
