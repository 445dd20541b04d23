"""Collectives over the ranks that hold the same piece, of a world of which few ranks are kept."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.plan.all_reduce import Algorithm
from workbench.predict.alike import Alike
from workbench.predict.duration import Speeds
from workbench.predict.events import Call, Grouping, Segments
from workbench.predict.meeting import Meeting
from workbench.predict.rows import Counts


class Replicas:
    """Replica groups of any size.

    Args:
        ranks: that are kept.
        speeds: of them.
    """

    def __init__(self, ranks: Alike, speeds: Speeds) -> None:
        self.ranks, self.speeds = ranks, speeds
        self.algorithms: dict[str, dict[str, None]] = {}
        self._groupings: dict[int, Grouping] = {}

    def count(self, group_size: int) -> int:
        """Ranks that hold the same piece of what lies over groups of this size."""
        return self.ranks.world_size // group_size

    def grouping(self, group_size: int) -> Grouping:
        """Which of the kept ranks hold the same piece."""
        if group_size not in self._groupings:
            self._groupings[group_size] = Grouping(self.ranks.ranks % group_size)
        return self._groupings[group_size]

    def all_reduce(
        self,
        sizes: Counts,
        itemsize: int,
        group_size: int,
        label: str,
        *,
        phase: str = "step",
        algorithm: Algorithm = "auto",
        beside: bool = False,
        shared: bool = False,
        takes: NDArray[np.bool_] | None = None,
    ) -> Call:
        """Sums over the replica groups.

        Args:
            sizes: bytes of each rank.
            itemsize: of an element.
            group_size: of the shard groups that the pieces lie over.
            label: what is summed.
            phase: of the step.
            algorithm: as asked for.
            beside: whether ranks may compute on meanwhile.
            shared: whether what is summed lies in memory that ranks of a host share, if they do.
            takes: who takes part; None: all.
        """
        count, names = self.count(group_size), self.algorithms.setdefault(label, {})

        def seconds(meeting: Meeting, nbytes: int) -> float:
            there = shared and meeting.memory and max(meeting.hosts) > 1
            done = meeting.all_reduce(nbytes, algorithm, beside=beside and not there)
            names.setdefault(done.algorithm)
            return done.seconds

        segments = Segments(sizes // itemsize, itemsize, group_size, count)
        call = self._call("all_reduce", label, phase, group_size, sizes, seconds, takes)
        received = segments.received(self.ranks.ranks)
        return replace(call, bytes=received, segments=segments)

    def all_gather(
        self, sizes: Counts, group_size: int, label: str, takes: NDArray[np.bool_] | None
    ) -> Call:
        """Hands out pieces, of equal sizes, over the replica groups.

        Args:
            sizes: bytes of all pieces together.
            group_size: of the shard groups that the parameters lie over.
            label: what is handed out.
            takes: who takes part; None: all.
        """
        count = self.count(group_size)

        def seconds(meeting: Meeting, nbytes: int) -> float:
            return meeting.seconds("all_gather", nbytes - nbytes // count)

        call = self._call("all_gather", label, "step", group_size, sizes, seconds, takes)
        return replace(call, bytes=sizes - sizes // count)

    def _call(
        self,
        op: str,
        label: str,
        phase: str,
        group_size: int,
        sizes: Counts,
        seconds: Callable[[Meeting, int], float],
        takes: NDArray[np.bool_] | None = None,
    ) -> Call:
        found: list[float] = []
        world, busy = self.ranks.world_size, 0.0
        known: dict[tuple[int, int], float] = {}
        for rank, size in zip(self.ranks.ranks.tolist(), sizes.tolist(), strict=True):
            place = rank % group_size
            if (place, size) not in known:
                meeting = self.speeds.meeting(range(place, world, group_size))
                known[place, size] = seconds(meeting, size)
                busy = max(busy, meeting.link.busy)
            found.append(known[place, size])
        groups, times = self.grouping(group_size), np.array(found)
        return Call(op, label, phase, groups, times, sizes, busy=busy, takes=takes)
