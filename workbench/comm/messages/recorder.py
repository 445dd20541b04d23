"""Counts what each collective moves, how long its caller stands still for it, and its phases."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from workbench.plan.experiment.metrics import CollectiveTrace, Phase, PhaseName

StepPhase = Literal["forward", "backward", "step"]
Doing = Literal["blocked", "helping"]
"""What a rank's thread does for a collective: it waits in it, or it advances one that runs beside
its computation."""


class RecordKey(NamedTuple):
    """What one row of the record counts."""

    group: str
    op: str
    layer: str
    phase: StepPhase


@dataclass(frozen=True)
class Record:
    """One row: the sums over all calls of `op` for `layer` in `group` during `phase`.

    Attributes:
        group: the group's name, "shard(0,1)".
        op: the collective's name, "all_gather".
        layer: the layer for which it was called.
        phase: the phase of the step in which it was called.
        calls: the number of calls.
        messages: the number of non-empty pieces that this rank received from other ranks.
        bytes: the size of these pieces, in bytes.
        seconds: how long callers were blocked; what ran beside their work is not counted.
        rounds: the number of exchanges that followed each other, in which this rank took part.
        additions: the number of elements that this rank added to others of the same place. Like
            messages they are the algorithm's, whatever the ranks communicate through.
    """

    group: str
    op: str
    layer: str
    phase: StepPhase
    calls: int
    messages: int
    bytes: int
    seconds: float
    rounds: int
    additions: int

    @property
    def counts(self) -> tuple[str, str, str, str, int, int, int]:
        """(group, op, layer, phase, calls, messages, bytes): what can be known before a run."""
        where = self.group, self.op, self.layer, self.phase
        return (*where, self.calls, self.messages, self.bytes)


class RecordedCall(Protocol):
    """One collective of a group, as a listener knows it; it can be the key of a dict."""

    @property
    def key(self) -> RecordKey: ...

    @property
    def number(self) -> int: ...


class RecordListener(Protocol):
    """Is told of each collective as it goes on, by the thread that it concerns."""

    def begun(self, call: RecordedCall) -> None:
        """A collective has its place in the order."""
        ...

    def received(self, call: RecordedCall, num_bytes: int) -> None:
        """This rank receives so many bytes in it."""
        ...

    def entered(self, call: RecordedCall, doing: Doing) -> None:
        """The thread turns to it."""
        ...

    def left(self, call: RecordedCall, doing: Doing) -> None:
        """The thread turns back."""
        ...


class BytesBySender:
    """Bytes that came from each other rank, of all groups and layers together.

    For those who ask who sends how much to whom: kept by collective and phase alone, so that what
    is kept of a long run of many layers on many ranks is small.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[tuple[str, StepPhase, int]] = Counter()

    def add(self, key: RecordKey, received: Iterable[tuple[int, int]]) -> None:
        """Adds what came of a collective."""
        with self._lock:
            for sender, size in received:
                self._sums[key.op, key.phase, sender] += size

    def rows(self) -> tuple[tuple[str, StepPhase, int, int], ...]:
        """Returns (op, phase, global rank of the sender, bytes) of each sum, in this order."""
        with self._lock:
            return tuple((*of, size) for of, size in sorted(self._sums.items()))


class Recorder:
    """Adds up calls, messages, bytes and seconds; any thread may add.

    Attributes:
        traces: the list to which all-reduces that begin now add their phases; None: none is kept.
        listener: the object that is told of every collective meanwhile; None: there is none.
        by_sender: the counts of bytes by sender; None: they are not kept.
    """

    def __init__(self) -> None:
        self.listener: RecordListener | None = None
        self.by_sender: BytesBySender | None = None
        self._lock = threading.Lock()
        self.traces: list[CollectiveTrace] | None = None
        self.reset()

    @contextmanager
    def tracing(self) -> Iterator[list[CollectiveTrace]]:
        """Traces every all-reduce that begins in the body; the list fills as they end."""
        before, self.traces = self.traces, []
        try:
            yield self.traces
        finally:
            self.traces = before

    def reset(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._sums: dict[RecordKey, tuple[int, int, int, float, int, int]] = {}
            self._blocked_s = 0.0
            self._received_bytes = 0

    def add(
        self,
        key: RecordKey,
        *,
        calls: int = 0,
        messages: int = 0,
        bytes: int = 0,
        seconds: float = 0.0,
        rounds: int = 0,
        additions: int = 0,
    ) -> None:
        """Adds to the row of `key`; see `Record`."""
        with self._lock:
            old = self._sums.get(key, (0, 0, 0, 0.0, 0, 0))
            self._sums[key] = (
                old[0] + calls,
                old[1] + messages,
                old[2] + bytes,
                old[3] + seconds,
                old[4] + rounds,
                old[5] + additions,
            )
            self._blocked_s += seconds
            self._received_bytes += bytes

    @property
    def blocked_s(self) -> float:
        """Seconds that callers have been blocked in collectives, all rows together."""
        return self._blocked_s

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank has received from others, all rows together."""
        return self._received_bytes

    def rows(self) -> list[Record]:
        """Returns the rows, in the order in which their keys were first seen."""
        with self._lock:
            return [Record(*(*key, *sums)) for key, sums in self._sums.items()]


class PhaseMark(Protocol):
    """Hears that a phase begins, and with it that the one before is over."""

    def __call__(self, phase: PhaseName, nbytes: int = 0) -> None: ...


def unheard(phase: PhaseName, nbytes: int = 0) -> None:
    """Ignores that a phase begins: the collective is not traced."""


class PhaseLog:
    """The phases of one collective, from the moment at which this is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._name: PhaseName = "copy"
        self._start_s, self._round, self._nbytes = 0.0, 0, 0
        self._phases: list[Phase] = []

    def mark(self, phase: PhaseName, nbytes: int = 0) -> None:
        """Begins a phase; one that goes on is still one, unless it is a further "send"."""
        if phase == self._name != "send":
            self._nbytes += nbytes
            return
        self._end()
        self._name, self._nbytes = phase, nbytes
        self._round += phase == "send"

    def close(self) -> tuple[float, tuple[Phase, ...]]:
        """Ends the last phase; returns the seconds of all of them together, and the phases."""
        self._end()
        return self._start_s, tuple(self._phases)

    def _end(self) -> None:
        now = time.perf_counter() - self._began
        if now > self._start_s:
            self._phases.append(
                Phase(self._name, self._round, self._start_s, now - self._start_s, self._nbytes)
            )
        self._start_s = now
