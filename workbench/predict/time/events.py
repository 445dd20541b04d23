"""The events of a step, on all ranks at once.

All ranks run one program, so a step is one list of events: work on the compute lane, blocking
collectives, collectives started on the communication lane, and waits for these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.metrics import What
from workbench.predict.time.duration import Seconds
from workbench.program.rows import Counts


class Grouping:
    """The groups in which the simulated ranks communicate.

    Args:
        number: the number of each rank's group [ranks].
        count: how many ranks of the world are in each group; None: only the simulated ones.

    Attributes:
        is_one: whether all simulated ranks are in one group.
        key: a key that is equal for equal groupings.
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
        """The greatest value in each rank's group [ranks]."""
        if self.is_one:
            return np.full_like(times, times.max())
        return np.maximum.reduceat(times[self._order], self._starts)[self._of]

    def share(self, which: NDArray[np.bool_]) -> Seconds:
        """The fraction of each rank's group for which `which` is true [ranks]."""
        found: Seconds = (np.bincount(self._of, which) / self._sizes)[self._of]
        return found


class Task(NamedTuple):
    """Work of every rank on its compute lane.

    Attributes:
        label: the layer, or what else it belongs to.
        seconds: seconds of the work on each rank [ranks].
    """

    what: What
    label: str
    seconds: Seconds


@dataclass(frozen=True)
class Computation:
    """Tasks that follow each other on the compute lane."""

    tasks: tuple[Task, ...]

    @cached_property
    def ends(self) -> Seconds:
        """Seconds of work until each task's end, [tasks, ranks]."""
        return np.cumsum([task.seconds for task in self.tasks], axis=0)


@dataclass(frozen=True, slots=True)
class Segments:
    """The near-equal segments that replicas reduce, one each; the first ones may be longer.

    Attributes:
        numel: the elements that each simulated rank reduces [ranks].
        itemsize: bytes of an element.
        group_size: the number of ranks in a shard group, which is the distance between replicas.
        count: the number of replicas.
    """

    numel: Counts
    itemsize: int
    group_size: int
    count: int

    def received(self, ranks: Counts) -> Counts:
        """Bytes that ranks of the world receive; `numel[i]` is rank i's or its representative's."""
        own = self.numel // self.count + (ranks // self.group_size < self.numel % self.count)
        return (own * (self.count - 2) + self.numel) * self.itemsize


@dataclass(frozen=True, slots=True)
class OwnSums:
    """What replicas reduce by an algorithm of a person's own.

    Attributes:
        numel: the elements that each simulated rank reduces [ranks].
        group_size: the number of ranks in a shard group, which is the distance between replicas.
        bytes: for each number of elements, the bytes that each replica receives [replicas].
    """

    numel: Counts
    group_size: int
    bytes: Mapping[int, Sequence[int]]

    def received(self, ranks: Counts) -> Counts:
        """Bytes that ranks of the world receive; `numel[i]` is rank i's or its representative's."""
        places = zip(self.numel.tolist(), (ranks // self.group_size).tolist(), strict=True)
        return np.array([self.bytes[numel][place] for numel, place in places], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, on all ranks at once.

    Attributes:
        op: the collective's name in the recorder, such as "all_reduce".
        label: the layer, or "gradients", "parameters", "status", "unscale", "clip", "labels",
            "weights".
        phase: "forward", "backward" or "step".
        seconds: seconds on each rank, once all of its group have arrived [ranks].
        bytes: bytes that each rank receives [ranks].
        busy: the share of that time in which the device works for the collective and computes
            nothing else.
        takes: a mask of the ranks that take part [ranks]; None: all.
        segments: what ranks reduce in an all-reduce over replicas; None: another collective.
    """

    op: str
    label: str
    phase: str
    groups: Grouping
    seconds: Seconds
    bytes: Counts
    busy: float = 0.0
    takes: NDArray[np.bool_] | None = None
    segments: Segments | OwnSums | None = None

    def received(self, column: int, rank: int) -> int:
        """Bytes that one rank of the world receives, which a simulated rank represents."""
        if self.segments is None:
            return int(self.bytes[column])
        return int(self.segments.received(np.full_like(self.bytes, rank))[column])


@dataclass(frozen=True, slots=True)
class BlockingCollective:
    """A collective that blocks the compute lane."""

    call: Call


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """A collective on the communication lane, queued behind those started before it.

    Attributes:
        handle: the number under which it is waited for.
    """

    call: Call
    handle: int


@dataclass(frozen=True, slots=True)
class AwaitCollective:
    """The compute lane waits for a collective that was started.

    Attributes:
        handle: the number under which the collective was started.
    """

    handle: int
    label: str
    late: int = 0


Event = Computation | BlockingCollective | StartedCollective | AwaitCollective


class Script:
    """The events of one step, while they are written."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tasks: list[Task] = []

    def work(self, what: What, label: str, seconds: Seconds) -> None:
        """Adds computation on the compute lane."""
        self._tasks.append(Task(what, label, seconds))

    def meet(self, call: Call) -> None:
        """Adds a collective that blocks the compute lane."""
        self._add(BlockingCollective(call))

    def start(self, call: Call, handle: int) -> None:
        """Adds a collective on the communication lane, which is waited for under this handle."""
        self._add(StartedCollective(call, handle))

    def join(self, handle: int, label: str, late: int = 0) -> None:
        """Adds a wait for a started collective."""
        self._add(AwaitCollective(handle, label, late))

    def events(self) -> tuple[Event, ...]:
        """All events written so far, in order."""
        self._close()
        return tuple(self._events)

    def _add(self, event: Event) -> None:
        self._close()
        self._events.append(event)

    def _close(self) -> None:
        if self._tasks:
            self._events.append(Computation(tuple(self._tasks)))
            self._tasks = []
