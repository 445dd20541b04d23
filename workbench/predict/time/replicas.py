"""Collectives over the ranks that hold the same piece, of a world of which few ranks are kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.device import Device
from workbench.predict.time.duration import Speeds
from workbench.predict.time.events import Call, Grouping, Segments
from workbench.predict.time.meeting import Meeting
from workbench.program.representatives import Representatives
from workbench.program.rows import Counts

# Where codecs were not timed: reading and writing a gradient in so many passes in all.
_CODING = 8


class Replicas:
    """Replica groups of any size.

    Args:
        ranks: that are kept.
        speeds: of them.
    """

    def __init__(self, ranks: Representatives, speeds: Speeds) -> None:
        self.ranks, self.speeds = ranks, speeds
        self.algorithms: dict[str, dict[str, None]] = {}
        self._groupings: dict[int, Grouping] = {}

    def count(self, group_size: int) -> int:
        """Ranks that hold the same piece of what lies over groups of this size."""
        return self.ranks.world_size // group_size

    def grouping(self, group_size: int) -> Grouping:
        """Which of the kept ranks hold the same piece."""
        if group_size not in self._groupings:
            self._groupings[group_size] = Grouping(
                self.ranks.ranks % group_size, self.count(group_size)
            )
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
        codec: Codec | None = None,
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
            codec: through which it travels.
            takes: who takes part; None: all.
        """
        count, names = self.count(group_size), self.algorithms.setdefault(label, {})

        def seconds(meeting: Meeting, nbytes: int) -> float:
            there = shared and meeting.memory and max(meeting.hosts) > 1
            coded = "" if codec is None else codec.name
            done = meeting.all_reduce(
                nbytes,
                algorithm,
                beside=beside and not there,
                into_new=not (beside or shared),
                codec=coded,
            )
            names.setdefault(f"{done.algorithm} with {coded}" if coded else done.algorithm)
            return done.seconds

        if codec is not None:
            return self._coded(codec, sizes, itemsize, group_size, label, phase, seconds, takes)
        segments = Segments(sizes // itemsize, itemsize, group_size, count)
        call = self._call("all_reduce", label, phase, group_size, sizes, seconds, takes)
        received = segments.received(self.ranks.ranks)
        return replace(call, bytes=received, segments=segments)

    def _coded(
        self,
        codec: Codec,
        sizes: Counts,
        itemsize: int,
        group_size: int,
        label: str,
        phase: str,
        seconds: Callable[[Meeting, int], float],
        takes: NDArray[np.bool_] | None,
    ) -> Call:
        """What travels is encoded in segments, and decoded and encoded again by who adds it up.

        Of k segments a rank encodes all and one sum, and decodes two of each other rank, those
        that it adds up and those sums: (k + 1) / k times the whole, and 2 (k - 1) / k times.
        """
        count = self.count(group_size)
        numel = -(-sizes // itemsize // count)
        travels = count * np.array([codec.encoded_bytes(n) if n else 0 for n in numel.tolist()])
        call = self._call("all_reduce", label, phase, group_size, travels, seconds, takes)
        often = (3 * count - 1) / count / 2  # there and back

        def rate(device: Device) -> float:
            both_ways = device.coding_s_per_byte.get(codec.name)
            return _CODING / device.bandwidth if both_ways is None else often * both_ways

        coding = sizes * np.array([rate(device) for device in self.speeds.devices])
        coding = self.grouping(group_size).latest(coding)
        return replace(call, seconds=call.seconds + coding, bytes=2 * (travels - travels // count))

    def to_server(self, sizes: Counts, group_size: int, serves: NDArray[np.bool_]) -> Call:
        """Gradients of so many bytes go to those who serve, and are added up there."""
        others = self.count(group_size) - 1

        def seconds(meeting: Meeting, nbytes: int) -> float:
            return meeting.rooted(others * nbytes, others * nbytes)

        call = self._call("reduce", "gradients", "step", group_size, sizes, seconds, some(sizes))
        return replace(call, bytes=others * sizes * serves)

    def from_server(self, sizes: Counts, group_size: int, serves: NDArray[np.bool_]) -> Call:
        """Weights of so many bytes come back from them."""
        others = self.count(group_size) - 1

        def seconds(meeting: Meeting, nbytes: int) -> float:
            return meeting.rooted(others * nbytes, 0)

        call = self._call(
            "broadcast", "parameters", "step", group_size, sizes, seconds, some(sizes)
        )
        return replace(call, bytes=sizes * ~serves)

    def serves(self, server: int, group_size: int) -> NDArray[np.bool_]:
        """Which of the kept ranks serve what lies over groups of this size.

        Args:
            server: its number among the kept ranks.
            group_size: of the shard groups.
        """
        group = self.ranks.ranks // group_size
        found: NDArray[np.bool_] = group == group[server]
        return found

    def part(self, group_size: int, shares: Sequence[float]) -> NDArray[np.float64]:
        """What part of what all ranks of its replica group hold each rank moves.

        Args:
            group_size: of the shard groups that the parameters lie over.
            shares: relative ones, of the kept ranks.
        """
        each = np.array(shares, dtype=np.float64)
        return each / self._all_of(each, group_size, np.sum)

    def to_owners(self, sizes: Counts, group_size: int, shares: Sequence[float]) -> Call:
        """The first round of a direct all-reduce of gradients, for segments like these shares.

        Args:
            sizes: bytes of each rank.
            group_size: of the shard groups that the pieces lie over.
            shares: relative ones, of the kept ranks.
        """
        moved = sizes * self.part(group_size, shares) * (self.count(group_size) - 1)
        return self._owned("reduce_scatter", "gradients", sizes, moved, group_size, shares, True)

    def from_owners(
        self, sizes: Counts, group_size: int, shares: Sequence[float], *, fused: bool
    ) -> Call:
        """Hands out the weights that each rank has moved, over the replica groups.

        Args:
            sizes: bytes of all pieces together.
            group_size: of the shard groups that the parameters lie over.
            shares: relative ones, of the kept ranks.
            fused: whether that is the second round of a direct all-reduce.
        """
        moved = sizes * (1 - self.part(group_size, shares))
        return self._owned("all_gather", "parameters", sizes, moved, group_size, shares, fused)

    def _owned(
        self,
        op: str,
        label: str,
        sizes: Counts,
        moved: NDArray[np.float64],
        group_size: int,
        shares: Sequence[float],
        fused: bool,
    ) -> Call:
        """It takes as long as it takes the owner of the largest segment."""
        count = self.count(group_size)

        def seconds(meeting: Meeting, nbytes: int) -> float:
            if fused:
                return meeting.all_reduce(nbytes, "direct", beside=False).seconds / 2
            return meeting.seconds("all_gather", nbytes - nbytes // count)

        call = self._call(op, label, "step", group_size, sizes, seconds, some(sizes))
        each = np.array(shares, dtype=np.float64)
        most = self._all_of(each, group_size, np.max) * count
        longer = most / self._all_of(each, group_size, np.sum)
        return replace(call, seconds=call.seconds * longer, bytes=np.rint(moved).astype(np.int64))

    def _all_of(
        self,
        each: NDArray[np.float64],
        group_size: int,
        join: Callable[[NDArray[np.float64]], np.float64],
    ) -> NDArray[np.float64]:
        """Of each kept rank, what `join` makes of all ranks of its replica group in the world."""
        world = each[self.ranks.column]
        groups = np.array([join(world[member::group_size]) for member in range(group_size)])
        joined: NDArray[np.float64] = groups[self.ranks.ranks % group_size]
        return joined

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


def some(sizes: Counts) -> NDArray[np.bool_] | None:
    """The ranks that have something; None: all."""
    return None if sizes.all() else sizes > 0
