"""Memory that sums of gradients need while they are under way beside the backward pass.

Where buckets are summed where they lie, in memory that ranks share, there is none. Elsewhere a
rank needs memory for what arrives, in segments of n/k elements of a bucket of n over k ranks:

    direct               k - 1 segments; with a fused update, of what each rank moves
    ring                 1 segment
    halving_doubling     half a bucket, and a whole one where a further rank is folded in
    hierarchical         of a host's segment, what its owners on other hosts send at one time
    parameter server     the buckets of all others, on the server
    with a codec         direct: encodings of all segments, k - 1 of the own one, and its sum;
                         ring: two encodings of a segment; between two hosts: two of what goes

A bucket's sum begins when its last gradient is there and the sums of all buckets before it have
begun: one that is filled early waits for those. Its memory is taken to be there until the rank
looks after its sums again: when the next gradient is there, or while it waits in another
collective.

Late sums begin all at once when a step's weights are moved, and have their memory until they have
moved. Those of the steps before are taken to be over by then: what a link that is slower than the
steps keeps under way is not in here.
"""

import numpy as np

from workbench.plan.codec import Codec
from workbench.plan.experiment import LocalSGD, ParameterServer, Pipelined, Synchronous
from workbench.plan.mesh import replica_groups
from workbench.predict.memory.timeline import Timeline
from workbench.predict.traffic.collective_costs import encoded, segments
from workbench.predict.traffic.summing import started_as
from workbench.program.buckets import Column
from workbench.program.collectives import takes_part
from workbench.program.instructions import Reduce
from workbench.program.rows import Counts
from workbench.program.sharding import moved_by
from workbench.program.step import Program

_FP32 = 4


class ReductionBuffers:
    """Makes them as sums begin, and drops them.

    Args:
        program: whose experiment sums gradients.
        timeline: to write on.
    """

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.program, self.timeline = program, timeline
        self._needed = not _lies_there(program)
        self._known: dict[tuple[int, int, str], Counts] = {}
        self._under_way: list[int] = []

    def begin(self, reduce: Reduce) -> None:
        """A sum begins.

        Args:
            reduce: on all ranks of the world.
        """
        if self._needed:
            room = self._room(reduce) * takes_part(reduce)
            self._under_way.append(self.timeline.make(room, "buckets", "arriving"))

    def finish(self) -> None:
        """The sums under way are there."""
        for tensor in self._under_way:
            self.timeline.drop(tensor)
        self._under_way = []

    def _room(self, reduce: Reduce) -> Counts:
        """What a sum on all ranks needs; those of every round need the same."""
        column = reduce.column
        key = column.group_size, column.number, min(column.names)
        if key not in self._known:
            self._known[key] = self._of(reduce)
        return self._known[key]

    def _of(self, reduce: Reduce) -> Counts:
        program, column = self.program, reduce.column
        sync = program.experiment.sync
        if isinstance(sync, ParameterServer):
            return _at_server(column, sync.server)
        if reduce.to == "owners":
            return _at_owners(program, column)
        room, width = np.zeros_like(column.bytes), program.itemsize
        groups = replica_groups(column.group_size, len(room))
        for members, hosts in zip(groups, program.hosts.over(groups), strict=True):
            nbytes, codec = int(column.bytes[members[0]]), reduce.codec
            name = started_as(reduce.algorithm, True, codec, nbytes, hosts)
            if len(members) > 1:
                room[list(members)] = _room(name, nbytes // width, width, hosts, codec)
        return room


def _lies_there(program: Program) -> bool:
    """Whether all buckets are summed where they lie."""
    sync = program.experiment.sync
    if isinstance(sync, Synchronous | Pipelined):
        one = len(program.hosts.ranks) == 1
        return one and sync.algorithm in ("auto", "hierarchical") and sync.codec is None
    return isinstance(sync, LocalSGD)


def _at_server(column: Column, server: int) -> Counts:
    k, world = column.group_size, len(column.place)
    serves = np.arange(world) // k == server // k
    return column.bytes * (world // k - 1) * serves


def _at_owners(program: Program, column: Column) -> Counts:
    """What others send of each rank's own segment, unless all of them share memory."""
    k, world = column.group_size, program.plan.world_size
    moved = moved_by(column, program.itemsize, program.experiment.optimizer_shares)
    own = sum(moved.values(), np.zeros_like(column.bytes))
    mates = program.hosts.mates(replica_groups(k, world))
    return own * (world // k - 1) * (mates < world // k)


def _room(
    name: str, length: int, itemsize: int, hosts: tuple[int, ...], codec: Codec | None
) -> Counts:
    """Bytes on each rank of a group with so many on each host."""
    ranks = sum(hosts)
    own = segments(length, ranks)
    sizes = encoded(own, itemsize, codec)
    if name == "hierarchical" and len(hosts) > 1:
        part = np.concatenate([segments(length, n) for n in hosts])
        if len(hosts) == 2:
            return encoded(part, itemsize, codec) * (1 if codec is None else 2)
        stripe = encoded(-(-part // len(hosts)), itemsize, codec)
        return stripe * (len(hosts) - 1 + (0 if codec is None else len(hosts)))
    if name == "ring":
        return np.full_like(own, sizes[0] * (1 if codec is None else 2))
    if name == "halving_doubling":
        power = 2 ** (ranks.bit_length() - 1)
        half = int(segments(length, power)[: power // 2].sum()) * itemsize
        folded = np.arange(ranks) < ranks - power
        return (half + folded * length * itemsize) * (np.arange(ranks) < power)
    if name == "direct" and codec is not None:
        return sizes.sum() + (ranks - 1) * sizes + own * max(itemsize, _FP32)
    if name == "direct" and len(hosts) > 1:
        return (ranks - 1) * sizes
    return np.zeros_like(own)
