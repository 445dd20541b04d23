"""The engines of a cluster, as the job server knows them: who is there, and who died."""

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.server.engine_calls import Arrival, EngineCalls
from workbench.server.vitals import out_of_memory_kills
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
    """

    def __init__(self, store: Store, engine_calls: EngineCalls) -> None:
        self._store, self._engine_calls = store, engine_calls
        self._watch = Watch()
        self._connection = engine_calls.connection
        self._came: dict[ProcessIdentity, Arrival] = {}
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
        for record in list(self.records.values()):
            self._settle(record)

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

    def idle(self) -> list[int]:
        """The engines that take ranks and have none, and that could be called now."""
        return [
            index
            for index, record in sorted(self.records.items())
            if record.state == "idle" and not record.is_assistant and self.is_ready(index)
        ]

    def _settle(self, record: EngineRecord) -> None:
        """Writes by which number an engine that has come can be called."""
        process = record.process
        if process is None or process not in self._came or process in self.died:
            return
        engine_id = self._came[process].engine_id
        if record.state == "starting" or record.engine_id != engine_id:
            state: EngineState = "idle" if record.job is None else "busy"
            self._store.set_engine(record.index, engine_id=engine_id, state=state)
            self.records[record.index] = replace(record, engine_id=engine_id, state=state)
