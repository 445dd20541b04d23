"""Counts what each collective moved, and how long its caller stood still for it."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from workbench.plan.phases import CollectiveTrace

if TYPE_CHECKING:
    from workbench.comm.groups.group import Call

Phase = Literal["forward", "backward", "step"]
Doing = Literal["blocked", "helping"]
"""What a rank's thread does for a collective: it waits in it, or it advances one that runs beside
its computation."""


class Key(NamedTuple):
    """What one row of the record counts."""

    group: str
    op: str
    layer: str
    phase: Phase


@dataclass(frozen=True)
class Record:
    """One row: the sums over all calls of `op` for `layer` in `group` during `phase`.

    Attributes:
        messages: non-empty pieces that this rank received from other ranks.
        bytes: their size.
        seconds: how long callers were blocked; what ran beside their work is not counted.
        rounds: exchanges that followed each other, in which this rank took part.
        additions: elements that this rank added to others of the same place. Like messages they
            are the algorithm's, whatever the ranks communicate through.
    """

    group: str
    op: str
    layer: str
    phase: Phase
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


class Listener(Protocol):
    """Is told of each collective as it goes on, by the thread that it concerns."""

    def begun(self, call: "Call") -> None:
        """A collective has its place in the order."""
        ...

    def received(self, call: "Call", num_bytes: int) -> None:
        """So much of it comes to this rank."""
        ...

    def entered(self, call: "Call", doing: Doing) -> None:
        """The thread turns to it."""
        ...

    def left(self, call: "Call", doing: Doing) -> None:
        """The thread turns back."""
        ...


class Givers:
    """Bytes that came from each other rank, of all groups and layers together.

    For those who ask who sends how much to whom: kept by collective and phase alone, so that what
    is kept of a long run of many layers on many ranks is small.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[tuple[str, Phase, int]] = Counter()

    def add(self, key: Key, received: Iterable[tuple[int, int]]) -> None:
        """Adds what came of a collective: from which global rank, and bytes."""
        with self._lock:
            for giver, size in received:
                self._sums[key.op, key.phase, giver] += size

    def rows(self) -> tuple[tuple[str, Phase, int, int], ...]:
        """(op, phase, global rank of the giver, bytes), in order."""
        with self._lock:
            return tuple((*of, size) for of, size in sorted(self._sums.items()))


class Recorder:
    """Adds up calls, messages, bytes and seconds; any thread may add.

    Attributes:
        traces: where all-reduces that begin now leave their phases; None: nobody asks.
        listener: who is told of every collective meanwhile; None: nobody.
        givers: where it is counted from whom things come; None: nobody asks.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.givers: Givers | None = None
        self._lock = threading.Lock()
        self.traces: list[CollectiveTrace] | None = None
        self.reset()

    @contextmanager
    def tracing(self) -> Iterator[list[CollectiveTrace]]:
        """Has every all-reduce that begins in the body traced; the list fills as they end."""
        before, self.traces = self.traces, []
        try:
            yield self.traces
        finally:
            self.traces = before

    def reset(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._sums: dict[Key, tuple[int, int, int, float, int, int]] = {}
            self._blocked_s = 0.0
            self._received_bytes = 0

    def add(
        self,
        key: Key,
        *,
        calls: int = 0,
        messages: int = 0,
        bytes: int = 0,
        seconds: float = 0.0,
        rounds: int = 0,
        additions: int = 0,
    ) -> None:
        """Adds to the row of `key`."""
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
        """What this rank has received from others, all rows together."""
        return self._received_bytes

    def rows(self) -> list[Record]:
        """The rows, in the order in which their keys were first seen."""
        with self._lock:
            return [Record(*(*key, *sums)) for key, sums in self._sums.items()]
