"""Collectives over replica groups: the ranks that hold the same piece of the model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.plan.collective.algorithm import Algorithm, dry_run
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.extension.extension import name_of
from workbench.plan.extension.user_object import Own
from workbench.plan.machine.device import Device
from workbench.predict.time.duration import Speeds
from workbench.predict.time.events import Call, Grouping, OwnSums, Segments
from workbench.predict.time.group_topology import GroupTopology
from workbench.program.rows import Counts, Representatives

# Where codecs were not timed, they read and write a gradient in so many passes in all.
_CODING = 8


class Replicas:
    """The replica groups of the simulated ranks, for shard groups of any size."""

    def __init__(self, ranks: Representatives, speeds: Speeds) -> None:
        self.ranks, self.speeds = ranks, speeds
        self.algorithms: dict[str, dict[str, None]] = {}
        self._groupings: dict[int, Grouping] = {}

    def count(self, group_size: int) -> int:
        """How many ranks hold the same piece of what is sharded over groups of this size."""
        return self.ranks.world_size // group_size

    def grouping(self, group_size: int) -> Grouping:
        """The simulated ranks, grouped by the piece that they hold."""
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
        codec: AnyCodec | None = None,
        takes: NDArray[np.bool_] | None = None,
    ) -> Call:
        """An all-reduce over the replica groups.

        Args:
            sizes: bytes of each rank [ranks].
            itemsize: the bytes of an element.
            label: the name of what is reduced, such as "gradients".
            phase: the phase of the step: "forward", "backward" or "step".
            beside: whether ranks may compute meanwhile.
            shared: whether the buffers are in memory that the ranks of a host share, where they
                share any.
            codec: the codec that compresses what is sent, if any.
            takes: a mask of the ranks that take part [ranks]; None: all.
        """
        count, names = self.count(group_size), self.algorithms.setdefault(label, {})
        by = "direct" if isinstance(algorithm, Own) else algorithm
        if isinstance(algorithm, Own) and count > 1:
            coded = "" if codec is None else f" with {codec.name}"
            names.setdefault(f"{name_of(algorithm)}{coded}")
            return self._own(algorithm, codec, sizes, itemsize, group_size, label, phase, takes)

        def seconds(topology: GroupTopology, nbytes: int) -> float:
            there = shared and topology.memory and max(topology.hosts) > 1
            coded = "" if codec is None else codec.name
            done = topology.all_reduce(
                nbytes,
                by,
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
        codec: AnyCodec,
        sizes: Counts,
        itemsize: int,
        group_size: int,
        label: str,
        phase: str,
        seconds: Callable[[GroupTopology, int], float],
        takes: NDArray[np.bool_] | None,
    ) -> Call:
        """An all-reduce whose segments are encoded, decoded, added, and encoded again.

        Of k segments a rank encodes all and one sum, and decodes two of each other rank, those
        that it adds up and those sums: (k + 1) / k times the whole, and 2 (k - 1) / k times.
        """
        count = self.count(group_size)
        numel = -(-sizes // itemsize // count)
        travels = count * np.array([codec.encoded_bytes(n) if n else 0 for n in numel.tolist()])
        call = self._call("all_reduce", label, phase, group_size, travels, seconds, takes)
        often = (3 * count - 1) / count
        rates = [self._rate(device, codec, count) for device in self.speeds.devices]
        coding = often * sizes * np.array(rates)
        coding = self.grouping(group_size).latest(coding)
        return replace(call, seconds=call.seconds + coding, bytes=2 * (travels - travels // count))

    @staticmethod
    def _rate(device: Device, codec: AnyCodec, count: int) -> float:
        """Seconds for a byte that a device encodes or decodes, among so many replicas."""
        both_ways = device.coding_s_per_byte.get(codec.name)
        if both_ways is not None:
            return both_ways / 2
        return _CODING / device.bandwidth * count / (3 * count - 1)

    def _own(
        self,
        algorithm: Own,
        codec: AnyCodec | None,
        sizes: Counts,
        itemsize: int,
        group_size: int,
        label: str,
        phase: str,
        takes: NDArray[np.bool_] | None,
    ) -> Call:
        """An all-reduce by an algorithm of a person's own, of what its ranks exchange when dry.

        Its time is that of the longest chain of messages that wait for each other, of bytes that
        follow each other, and of additions.
        """
        count, numel = self.count(group_size), sizes // itemsize
        runs = {
            length: dry_run(algorithm, length, itemsize, count, codec)
            for length in set(numel.tolist())
        }

        def seconds(topology: GroupTopology, nbytes: int) -> float:
            longest = runs[nbytes // itemsize].longest
            if longest.rounds == 0:
                return 0.0
            added = longest.additions * itemsize
            return topology.link.exchanges(count, longest.bytes, longest.rounds, added)

        call = self._call("all_reduce", label, phase, group_size, sizes, seconds, takes)
        if codec is not None:
            places = zip(numel.tolist(), (self.ranks.ranks // group_size).tolist(), strict=True)
            coded = [runs[length].encoded[i] + runs[length].decoded[i] for length, i in places]
            rates = [self._rate(device, codec, count) for device in self.speeds.devices]
            coding = self.grouping(group_size).latest(itemsize * np.array(coded) * rates)
            call = replace(call, seconds=call.seconds + coding)
        bytes_ = {length: run.bytes for length, run in runs.items()}
        sums = OwnSums(numel, group_size, bytes_)
        return replace(call, bytes=sums.received(self.ranks.ranks), segments=sums)

    def to_server(self, sizes: Counts, group_size: int, serves: NDArray[np.bool_]) -> Call:
        """A reduce of gradients of so many bytes [ranks] to the parameter servers."""
        others = self.count(group_size) - 1

        def seconds(topology: GroupTopology, nbytes: int) -> float:
            return topology.rooted(others * nbytes, others * nbytes)

        call = self._call("reduce", "gradients", "step", group_size, sizes, seconds, some(sizes))
        return replace(call, bytes=others * sizes * serves)

    def from_server(self, sizes: Counts, group_size: int, serves: NDArray[np.bool_]) -> Call:
        """A broadcast of weights of so many bytes [ranks] from the parameter servers."""
        others = self.count(group_size) - 1

        def seconds(topology: GroupTopology, nbytes: int) -> float:
            return topology.rooted(others * nbytes, 0)

        call = self._call(
            "broadcast", "parameters", "step", group_size, sizes, seconds, some(sizes)
        )
        return replace(call, bytes=sizes * ~serves)

    def serves(self, server: int, group_size: int) -> NDArray[np.bool_]:
        """A mask of the simulated ranks that act as parameter servers [ranks].

        Args:
            server: the server's index among the simulated ranks.
        """
        group = self.ranks.ranks // group_size
        found: NDArray[np.bool_] = group == group[server]
        return found

    def part(self, group_size: int, shares: Sequence[float]) -> NDArray[np.float64]:
        """The fraction of its replica group's piece that each rank updates [ranks].

        Args:
            shares: the relative share of each simulated rank [ranks].
        """
        each = np.array(shares, dtype=np.float64)
        return each / self._all_of(each, group_size, np.sum)

    def to_owners(self, sizes: Counts, group_size: int, shares: Sequence[float]) -> Call:
        """The reduce-scatter of a direct all-reduce of gradients, in segments of these shares.

        Args:
            sizes: bytes of each rank [ranks].
            shares: the relative share of each simulated rank [ranks].
        """
        moved = sizes * self.part(group_size, shares) * (self.count(group_size) - 1)
        return self._owned("reduce_scatter", "gradients", sizes, moved, group_size, shares, True)

    def from_owners(
        self, sizes: Counts, group_size: int, shares: Sequence[float], *, fused: bool
    ) -> Call:
        """The all-gather of updated weights over the replica groups.

        Args:
            sizes: bytes of the whole piece on each rank [ranks].
            shares: the relative share of each simulated rank [ranks].
            fused: whether it is the second round of a direct all-reduce.
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
        """A collective on unequal segments, which takes as long as the largest one."""
        count = self.count(group_size)

        def seconds(topology: GroupTopology, nbytes: int) -> float:
            if fused:
                return topology.all_reduce(nbytes, "direct", beside=False).seconds / 2
            return topology.seconds("all_gather", nbytes - nbytes // count)

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
        """For each simulated rank, `join` over its replica group in the world [ranks]."""
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
        seconds: Callable[[GroupTopology, int], float],
        takes: NDArray[np.bool_] | None = None,
    ) -> Call:
        found: list[float] = []
        world, busy = self.ranks.world_size, 0.0
        known: dict[tuple[int, int], float] = {}
        for rank, size in zip(self.ranks.ranks.tolist(), sizes.tolist(), strict=True):
            place = rank % group_size
            if (place, size) not in known:
                topology = self.speeds.topology(range(place, world, group_size))
                known[place, size] = seconds(topology, size)
                busy = max(busy, topology.link.busy)
            found.append(known[place, size])
        groups, times = self.grouping(group_size), np.array(found)
        return Call(op, label, phase, groups, times, sizes, busy=busy, takes=takes)


def some(sizes: Counts) -> NDArray[np.bool_] | None:
    """A mask of the ranks whose size is not zero [ranks]; None: all."""
    return None if sizes.all() else sizes > 0
