"""The memory of weight gradients, and of the buffers that their reduction needs.

    in a bucket                   a view of its flat buffer, which stays; made beside it and
                                  copied in, but for large linear layers' first of a step
    in none, large linear layer   written where the last step's was: it stays
    in none                       made in the backward pass, gone when the next step begins

A further gradient of the same step is made in new memory and added to the first.

Source: `torch.autograd`'s AccumulateGrad; the workbench's GradientSum and Linear.

Memory that reductions of gradients need while they run beside the backward pass:

Buckets in memory that ranks share are reduced in place, and need none; nor do those that nccl sums
by its own algorithm, whose buffers torch's allocator does not see. Elsewhere a rank needs
memory for what it receives, in segments of n/k elements of a bucket of n elements over k ranks:

    direct               k - 1 segments; with a fused update, of the part that each rank updates
    ring                 1 segment
    halving_doubling     half a bucket, and a whole one where a further rank is folded in
    hierarchical         of a host's segment, what its owners on other hosts send at one time
    parameter server     the buckets of all others, on the server
    with a codec         direct: encodings of all segments, k - 1 of the own one, and its sum;
                         ring: two encodings of a segment; between two hosts: two of the sent part
    one of your own      what its messages need at one time, run without data

A bucket's reduction begins when its last gradient is made and the reductions of all buckets before
it have begun. Its memory is freed when the rank next polls: at the next gradient, or while it waits
in another collective.

Late reductions begin all at once when a step's weights are updated, and hold their memory until the
update. Those of earlier steps are taken to be over by then: what a link slower than the steps keeps
running is not counted.
"""

from collections.abc import Mapping

import numpy as np

from workbench.plan.collective.algorithm import Algorithm, dry_run
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.placement import replica_groups
from workbench.predict.memory.timeline import MemoryTimeline
from workbench.predict.traffic.collective_costs import encoded, segments, started_as
from workbench.program.buckets import KEEPS_GRADIENT_BYTES, Column, moved_by
from workbench.program.collectives import takes_part
from workbench.program.instructions import Reduce
from workbench.program.operations import HALF
from workbench.program.rows import Counts
from workbench.program.step import Program


class ReductionBuffers:
    """The receive buffers of reductions, from each one's beginning to its end.

    Args:
        own_gpus: whether each rank has a GPU of its own.
    """

    def __init__(
        self, program: Program, timeline: MemoryTimeline, *, own_gpus: bool = False
    ) -> None:
        self.program, self.timeline = program, timeline
        self._needed = not _lies_there(program, own_gpus)
        self._known: dict[tuple[int, int, str], Counts] = {}
        self._under_way: list[int] = []

    def begin(self, reduce: Reduce) -> None:
        """Begins a reduction."""
        if self._needed:
            room = self._room(reduce) * takes_part(reduce)
            self._under_way.append(self.timeline.make(room, "buckets", "arriving"))

    def finish(self) -> None:
        """Ends the running reductions, and frees their buffers."""
        for tensor in self._under_way:
            self.timeline.drop(tensor)
        self._under_way = []

    def _room(self, reduce: Reduce) -> Counts:
        """Bytes that a reduction on all ranks needs [ranks]; every round needs the same."""
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


class Gradients:
    """Writes the gradients of weights, from the backward pass that makes them to the step's end."""

    def __init__(
        self, program: Program, timeline: MemoryTimeline, arriving: ReductionBuffers
    ) -> None:
        experiment, plan, pieces = program.experiment, program.plan, program.pieces
        self.timeline = timeline
        self.half = experiment.half
        self.sizes = {name: pieces.sizes[name] for name in pieces.names}
        sums = not experiment.sync.timing.of_weights
        self.in_bucket = program.buckets.names
        rewritten = (
            layer.weights[0].name
            for layer in plan.graph.layers
            if sums and not self.half and layer.kind == "linear" and layer.weights
        )
        self.rewrites = {
            name: self.sizes[name] >= KEEPS_GRADIENT_BYTES
            for name in rewritten
            if name in self.sizes
        }
        self._there: dict[str, int | None] = {}
        self._pieces, self.arriving = pieces, arriving

    def resident(self) -> dict[str, Counts]:
        """Bytes of gradients that stay from step to step [ranks], for each layer that has some."""
        stays = {}
        for name, size in self.sizes.items():
            if name in self.in_bucket:
                stays[name] = size
            elif name in self.rewrites:
                stays[name] = size * self.rewrites[name]
        return self._pieces.by_layer(stays)

    def left_by_last_step(self) -> None:
        """Makes the gradients of the last step that are freed only when the next one begins."""
        for name, size in self.sizes.items():
            if name not in self.in_bucket:
                left = np.where(self.rewrites.get(name, False), 0, size)
                self._there[name] = self.timeline.make(left, "gradients", self._pieces.owners[name])

    def begin(self, names: set[str] | None = None) -> None:
        """Forgets the gradients of these parameters; None: of all."""
        for name in [n for n in self._there if names is None or n in names]:
            tensor = self._there.pop(name)
            if tensor is not None:
                self.timeline.drop(tensor)

    def made(self, layer: Layer) -> dict[str, int]:
        """The gradients that the backward pass of `layer` makes, by the weight's name."""
        return {w.name: self._made(w.name, layer.name) for w in layer.weights if w.trainable}

    def settle(self, made: Mapping[str, int]) -> None:
        """Hands the gradients that `made` has made, by the weight's name, to autograd."""
        for name, tensor in made.items():
            if name in self._there or name in self.in_bucket:
                self.timeline.drop(tensor)
                self._there.setdefault(name, None)
            else:
                self._there[name] = tensor
        if made:
            self.arriving.finish()

    def _made(self, name: str, layer: str) -> int:
        size = self.sizes[name]
        if name in self.rewrites and name not in self._there:
            size = np.where(self.rewrites[name], 0, size)
        if self.half:  # made in half precision, then cast
            self.timeline.pass_by(size // 4 * HALF, "workspace", layer)
        return self.timeline.make(size, "gradients", layer)


_FP32 = 4


def _lies_there(program: Program, own_gpus: bool) -> bool:
    """Whether all buckets are reduced in place."""
    sync = program.experiment.sync
    algorithm, codec = sync.summing
    if isinstance(sync, ParameterServer):
        return False
    one = len(program.hosts.ranks) == 1 or (own_gpus and algorithm == "auto")  # nccl's own
    alike = one and algorithm in ("auto", "hierarchical") and codec is None
    return alike or sync.timing.of_weights


def _at_server(column: Column, server: int) -> Counts:
    k, world = column.group_size, len(column.place)
    serves = np.arange(world) // k == server // k
    return column.bytes * (world // k - 1) * serves


def _at_owners(program: Program, column: Column) -> Counts:
    """Bytes that others send of each rank's own segment [ranks], unless all share memory."""
    k, world = column.group_size, program.plan.world_size
    moved = moved_by(column, program.itemsize, program.experiment.optimizer_shares)
    own = sum(moved.values(), np.zeros_like(column.bytes))
    mates = program.hosts.mates(replica_groups(k, world))
    return own * (world // k - 1) * (mates < world // k)


def _room(
    name: Algorithm, length: int, itemsize: int, hosts: tuple[int, ...], codec: AnyCodec | None
) -> Counts:
    """Bytes that an all-reduce needs on each rank of a group [ranks]."""
    ranks = sum(hosts)
    if isinstance(name, Own):
        return np.array(dry_run(name, length, itemsize, ranks, codec).memory, dtype=np.int64)
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
