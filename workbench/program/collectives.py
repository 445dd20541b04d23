"""The collectives of an instruction: those of conversions, and what else ranks call.

Batch norm over all rows sums statistics. The loss of what lies over groups gathers labels and,
where features are cut, the highest logits and sums of exponents. Heads of windowed attention,
version 2, sum the gradient of what they have in common. A step ends with what its strategy calls.
Conversions call

    conversion              forward          backward
    R -> R (copy)           -                all-reduce
    P -> R                  all-reduce       - (of summands: all-reduce)
    P -> S, P -> rows       reduce-scatter   all-gather
    R -> S, R -> rows       -                all-gather
    S -> R, rows -> R       all-gather       - (of summands: reduce-scatter)
    S -> S', rows <-> S     all-to-all       all-to-all
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.experiment import Experiment, ParameterServer
from workbench.plan.experiment.task import Loss as OwnLoss
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.flow import heads_of
from workbench.plan.placement.placement import (
    ROWS,
    Conversion,
    Layout,
    Partial,
    Replicate,
    Shard,
    replica_groups,
    shard_groups,
)
from workbench.program.buckets import Column, moved_by
from workbench.program.instructions import (
    Agree,
    Average,
    Backward,
    Clip,
    Convert,
    Direction,
    Forward,
    HandOut,
    Instruction,
    Loss,
    Recompute,
    Reduce,
    Unscale,
    Weigh,
)
from workbench.program.operations import Operation, Operations, Value
from workbench.program.rows import Counts, Groups, Rows, features

Phase = Literal["forward", "backward", "step"]
Purpose = Literal["shard", "replica", "norm", "control"]


class Exchange(NamedTuple):
    """An all-to-all: from which layout to which, of how many rows."""

    step: Conversion
    source: Layout
    target: Layout
    rows: Rows


class Summed(NamedTuple):
    """An all-reduce that is started, and goes on beside what follows."""

    algorithm: Algorithm
    buffer: bool
    codec: AnyCodec | None = None


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveCall:
    """One call of a collective on every rank that takes part.

    Attributes:
        label: the layer, or "gradients", "parameters", "status", "clip", "unscale",
            "labels", "weights".
        purpose: the purpose of its groups: "shard" is over shard groups, "replica" and "norm" are
            over ranks that hold the same piece, "control" is over the world.
        numel: elements of each rank: of an all_gather, of its own piece; of a reduce_scatter, of
            the piece that it gets; else of the whole that it has.
        takes: 1 for each rank that takes part, else 0; None: all do.
        how: the layouts of an all-to-all, or how an all-reduce goes on beside what follows; None:
            callers wait in it.
        server: the server of a reduce or a broadcast: 1 for each rank that is the root of its
            group.
    """

    op: str
    label: str
    phase: Phase
    purpose: Purpose
    group_size: int
    numel: Counts
    itemsize: int
    takes: Counts | None = None
    how: Exchange | Summed | None = None
    server: Counts | None = None
    every: int = 1

    def groups(self, world_size: int) -> Groups:
        match self.purpose:
            case "shard":
                return shard_groups(self.group_size, world_size)
            case "control":
                return shard_groups(world_size, world_size)
            case _:
                return replica_groups(self.group_size, world_size)


class Crossing(NamedTuple):
    """What a conversion calls; None: nothing."""

    forward: CollectiveCall | None = None
    backward: CollectiveCall | None = None


def crossing_of(step: Conversion, rows: Rows, itemsize: int, label: str = "") -> Crossing:
    def call(op: str, phase: Phase, numel: Counts, how: Exchange | None = None) -> CollectiveCall:
        return CollectiveCall(op, label, phase, "shard", step.group_size, numel, itemsize, how=how)

    after = rows.elements(step.target, step.shape, step.rows)
    before = rows.elements(step.source, step.shape, step.rows)
    summands = step.gradient == "partial"
    match step.source.placement, step.target.placement:
        case _ if step.source == step.target:
            return Crossing(None, call("all_reduce", "backward", after))
        case Partial(), Replicate() if step.target != ROWS:
            back = call("all_reduce", "backward", after) if summands else None
            return Crossing(call("all_reduce", "forward", after), back)
        case Partial(), _:
            return Crossing(
                call("reduce_scatter", "forward", after), call("all_gather", "backward", after)
            )
        case Replicate(), _ if step.source != ROWS:
            return Crossing(None, call("all_gather", "backward", after))
        case _, Replicate() if step.target != ROWS:
            back = call("reduce_scatter", "backward", before) if summands else None
            return Crossing(call("all_gather", "forward", before), back)
        case _:
            there = Exchange(step, step.source, step.target, rows)
            home = Exchange(step, step.target, step.source, rows)
            return Crossing(
                call("all_to_all", "forward", before, there),
                call("all_to_all", "backward", after, home),
            )


_FP32 = 4
_INT64 = 8
_FP64 = 8


class Collectives:
    """Gives the collectives of a program's instructions."""

    def __init__(self, experiment: Experiment, operations: Operations, world_size: int) -> None:
        self.experiment, self.operations, self.world_size = experiment, operations, world_size
        self.plan, self.itemsize = experiment.plan, operations.itemsize
        self._communicating = {
            layer.name
            for layer in self.plan.graph.layers
            if self.plan.synchronizes(layer) or trained_hidden(layer)
        }
        self._everywhere = np.ones(self.plan.world_size, dtype=np.int64)
        self._ranks = np.arange(self.plan.world_size)

    def of(self, instruction: Instruction) -> Iterable[CollectiveCall]:
        """Those of one instruction, in the order in which a rank calls them."""
        match instruction:
            case Forward(operation, on):
                return self.of_operation(operation, on.rows, "forward")
            case Backward(operation, on):
                return self.of_operation(operation, on.rows, "backward")
            case Convert(operation, on, direction):
                return self.of_operation(operation, on.rows, direction)
            case Recompute(_, operations, on):
                every = (self.of_operation(one, on.rows, "forward") for one in operations)
                return chain.from_iterable(every)
            case Loss(results, on):
                if isinstance(self.experiment.loss, OwnLoss):
                    return self._of_own_loss(results, on.rows)
                return chain.from_iterable(self.of_loss(value, on.rows) for value in results)
            case Reduce():
                return (self._reduce(instruction),)
            case HandOut(buckets):
                return (self._hand_out(instruction, column) for column in buckets.columns())
            case Average(buckets, every):
                return (self._average(column, every) for column in buckets.columns())
            case Agree():
                status = self._everywhere * (3 + self.world_size)
                return (
                    CollectiveCall("all_reduce", "status", "step", "control", 1, status, _FP64),
                )
            case Weigh():
                one = self._everywhere
                return (CollectiveCall("all_reduce", "weights", "step", "control", 1, one, _FP64),)
            case Unscale():
                one = self._everywhere
                return (CollectiveCall("all_reduce", "unscale", "step", "control", 1, one, _FP64),)
            case Clip(norm=float(), every=every):
                one = self._everywhere
                return (
                    CollectiveCall(
                        "all_reduce", "clip", "step", "control", 1, one, _FP64, every=every
                    ),
                )
            case _:
                return ()

    def of_operation(
        self, operation: Operation, rows: Rows, phase: Direction
    ) -> Iterable[CollectiveCall]:
        layer = operation.layer
        if operation.step is not None:
            crossing = crossing_of(operation.step, rows, operation.itemsize, operation.label)
            call = crossing.forward if phase == "forward" else crossing.backward
            return () if call is None else (call,)
        if layer is None or layer.name not in self._communicating:
            return ()
        if self.plan.synchronizes(layer):
            needed = phase == "forward" or operation.wanted
            return self._statistics(operation, layer, phase) if needed else ()
        return self._in_common(layer) if phase == "backward" else ()

    def _statistics(
        self, operation: Operation, layer: Layer, phase: Phase
    ) -> Iterator[CollectiveCall]:
        """Of batch norm over all that have the same channels."""
        read = self.plan.flow.inputs[layer.name]
        world, width = self.plan.world_size, max(operation.itemsize, _FP32)
        channels = self._everywhere * features(read, layer.input_shape[:1], world)
        for numel in (channels + 1, channels):
            yield CollectiveCall(
                "all_reduce", layer.name, phase, "norm", read.group_size, numel, width
            )

    def _in_common(self, layer: Layer) -> Iterator[CollectiveCall]:
        """The one gradient that heads of windowed attention, version 2, have in common."""
        hidden, choice = trained_hidden(layer), self.plan.layers.get(layer.name)
        if not hidden or choice is None or heads_of(layer, choice) is None:
            return
        numel, width = self._everywhere * (3 * hidden), self.itemsize
        yield CollectiveCall(
            "all_reduce", layer.name, "backward", "shard", choice.group_size, numel, width
        )

    def of_loss(self, value: Value, rows: Rows) -> Iterator[CollectiveCall]:
        """Those of the loss of one value that the model returns."""
        layout, _, _, _ = self.operations.layout_of(value)
        k, name = layout.group_size, value[0]
        if layout == ROWS:
            return
        loss = self.experiment.loss
        if isinstance(loss, OwnLoss):
            yield from filter(None, self._to_rows(value, rows))
            return
        each = math.prod(self.plan.graph.label_shape)
        labels = rows.own * each
        yield CollectiveCall("all_gather", "labels", "step", "shard", k, labels, _INT64)
        if isinstance(layout.placement, Shard):
            width, every = max(_FP32, self.itemsize), rows.over(k) * each
            yield CollectiveCall("all_gather", name, "step", "shard", k, every, width)
            sums = 2 if loss is None else 2 + (loss.label_smoothing > 0)
            yield CollectiveCall("all_reduce", name, "step", "shard", k, sums * every, width)

    def _of_own_loss(self, results: tuple[Value, ...], rows: Rows) -> Iterator[CollectiveCall]:
        """The user's own loss sees all outputs, by rows; their gradients go back the other way."""
        crossings = [self._to_rows(value, rows) for value in results]
        yield from filter(None, (one.forward for one in crossings))
        yield from filter(None, (one.backward for one in reversed(crossings)))

    def _to_rows(self, value: Value, rows: Rows) -> Crossing:
        layout, shape, each, itemsize = self.operations.layout_of(value)
        if layout == ROWS:
            return Crossing()
        return crossing_of(Conversion(layout, ROWS, "same", shape, each), rows, itemsize, value[0])

    def _reduce(self, reduce: Reduce) -> CollectiveCall:
        column, width = reduce.column, self.itemsize
        k, takes = column.group_size, takes_part(reduce)
        if reduce.to == "server":
            return CollectiveCall(
                "reduce",
                "gradients",
                "step",
                "replica",
                k,
                column.bytes // width,
                width,
                takes,
                server=self._serves(k),
            )
        if reduce.to == "owners":
            return CollectiveCall(
                "reduce_scatter",
                "gradients",
                "step",
                "replica",
                k,
                self._owned(column),
                width,
                takes,
            )
        replicas = self.world_size // k
        codec = reduce.codec if replicas > 1 else None
        how = Summed(reduce.algorithm, True, codec)
        numel = column.bytes // width
        return CollectiveCall(
            "all_reduce",
            "gradients",
            "step",
            "replica",
            k,
            numel,
            width,
            takes,
            how,
            every=reduce.every,
        )

    def _hand_out(self, hand_out: HandOut, column: Column) -> CollectiveCall:
        width, served = self.itemsize, hand_out.source == "server"
        return CollectiveCall(
            "broadcast" if served else "all_gather",
            "parameters",
            "step",
            "replica",
            column.group_size,
            column.bytes // width if served else self._owned(column),
            width,
            column.there,
            server=self._serves(column.group_size) if served else None,
            every=hand_out.every,
        )

    def _average(self, column: Column, every: int) -> CollectiveCall:
        numel, width = column.bytes // self.itemsize, self.itemsize
        return CollectiveCall(
            "all_reduce",
            "parameters",
            "step",
            "replica",
            column.group_size,
            numel,
            width,
            column.there,
            Summed("auto", False),
            every=every,
        )

    def _owned(self, column: Column) -> Counts:
        """Elements of a bucket that each rank updates."""
        width, shares = self.itemsize, self.experiment.optimizer_shares
        return sum(moved_by(column, width, shares).values(), 0 * self._everywhere) // width

    def _serves(self, group_size: int) -> Counts:
        """1 for each rank that updates what it has in common with others, else 0."""
        sync = self.experiment.sync
        assert isinstance(sync, ParameterServer)
        return (self._ranks // group_size == sync.server // group_size).astype(np.int64)


def takes_part(reduce: Reduce) -> Counts:
    """1 for each rank whose bucket begins to be summed, else 0."""
    column = reduce.column
    member = np.arange(len(column.place)) % column.group_size
    return column.there * np.isin(member, reduce.members)


def trained_hidden(layer: Layer) -> int:
    """Units of the hidden layer of version 2's table of positions, where that layer is trained."""
    first = (f"{layer.name}.cpb_mlp.0.weight", f"{layer.name}.cpb_mlp.0.bias")
    return max((w.shape[0] for w in layer.weights if w.name in first and w.trainable), default=0)
