"""What the ranks of a step do one after another, on all of them at once.

All ranks run one program, so that a step is one list of events: work on the compute lane,
collectives that the compute lane takes part in, collectives that are started beside it, and
places where it waits for these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.plan.span import What
from workbench.predict.time.duration import Seconds
from workbench.program.rows import Counts


class Grouping:
    """Which of the ranks at hand communicate with each other.

    Args:
        number: for each rank, that of its group.
        count: ranks of the world in each group; None: those at hand are all.

    Attributes:
        count: ranks of the world in the largest group.
        is_one: whether all ranks at hand are in one.
        key: equal for equal groups.
    """

    def __init__(self, number: Sequence[int] | Counts, count: int | None = None) -> None:
        found, self._of = np.unique(np.asarray(number), return_inverse=True)
        self.is_one = len(found) == 1
        self.key = self._of.tobytes()
        self._order = np.argsort(self._of, kind="stable")
        self._sizes = counts = np.bincount(self._of)
        self.count = int(counts.max()) if count is None else count
        self._starts = np.concatenate([[0], np.cumsum(counts)[:-1]])

    def latest(self, times: Seconds) -> Seconds:
        """For each rank, the greatest of its group's values."""
        if self.is_one:
            return np.full_like(times, times.max())
        return np.maximum.reduceat(times[self._order], self._starts)[self._of]

    def share(self, which: NDArray[np.bool_]) -> Seconds:
        """For each rank, of how much of its group this is so."""
        found: Seconds = (np.bincount(self._of, which) / self._sizes)[self._of]
        return found


class Task(NamedTuple):
    """Work of every rank on its compute lane.

    Attributes:
        what: the kind of its spans.
        label: the layer, or what else it belongs to.
        seconds: on each rank.
    """

    what: What
    label: str
    seconds: Seconds


@dataclass(frozen=True)
class Stretch:
    """Tasks that follow each other."""

    tasks: tuple[Task, ...]

    @cached_property
    def ends(self) -> Seconds:
        """Seconds of work until each task's end, [tasks, ranks]."""
        return np.cumsum([task.seconds for task in self.tasks], axis=0)


@dataclass(frozen=True, slots=True)
class Segments:
    """The near-equal segments that replicas sum, one each; the first ones may be longer.

    Attributes:
        numel: elements that each rank at hand sums.
        itemsize: bytes of an element.
        group_size: of the shard groups; replicas are so far apart.
        count: replicas.
    """

    numel: Counts
    itemsize: int
    group_size: int
    count: int

    def received(self, ranks: Counts) -> Counts:
        """Bytes that ranks of the world receive: `numel` is theirs, or their like's."""
        own = self.numel // self.count + (ranks // self.group_size < self.numel % self.count)
        return (own * (self.count - 2) + self.numel) * self.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, on all ranks at once.

    Attributes:
        op: as the recorder names it.
        label: the layer, or "gradients", "parameters", "status", "labels".
        phase: "forward", "backward" or "step".
        groups: who takes part together.
        seconds: on each rank, from when its group is there.
        bytes: that each rank receives.
        busy: share of that time in which a rank computes nothing else.
        takes: the ranks that take part; None: all.
        segments: of an all-reduce of replicas.
    """

    op: str
    label: str
    phase: str
    groups: Grouping
    seconds: Seconds
    bytes: Counts
    busy: float = 0.0
    takes: NDArray[np.bool_] | None = None
    segments: Segments | None = None

    def received(self, column: int, rank: int) -> int:
        """Bytes of one rank of the world, for which one of the ranks at hand stands."""
        if self.segments is None:
            return int(self.bytes[column])
        return int(self.segments.received(np.full_like(self.bytes, rank))[column])


@dataclass(frozen=True, slots=True)
class Meet:
    """A collective that the compute lane takes part in."""

    call: Call


@dataclass(frozen=True, slots=True)
class Start:
    """A collective on the communication lane, behind those before it.

    Attributes:
        call: the collective.
        handle: its number.
    """

    call: Call
    handle: int


@dataclass(frozen=True, slots=True)
class Join:
    """The compute lane waits for a collective that was started.

    Attributes:
        handle: its number.
        label: what is waited for.
        late: how many steps ago it was started.
    """

    handle: int
    label: str
    late: int = 0


Event = Stretch | Meet | Start | Join


class Script:
    """Events of one step, as they are written."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tasks: list[Task] = []

    def work(self, what: What, label: str, seconds: Seconds) -> None:
        """Something to compute."""
        self._tasks.append(Task(what, label, seconds))

    def meet(self, call: Call) -> None:
        """A collective in which the compute lane takes part."""
        self._add(Meet(call))

    def start(self, call: Call, handle: int) -> None:
        """A collective beside it, which is waited for under this number."""
        self._add(Start(call, handle))

    def join(self, handle: int, label: str, late: int = 0) -> None:
        """Waits for it."""
        self._add(Join(handle, label, late))

    def events(self) -> tuple[Event, ...]:
        """All of them, in order."""
        self._close()
        return tuple(self._events)

    def _add(self, event: Event) -> None:
        self._close()
        self._events.append(event)

    def _close(self) -> None:
        if self._tasks:
            self._events.append(Stretch(tuple(self._tasks)))
            self._tasks = []
