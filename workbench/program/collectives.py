"""The collectives of an instruction: those of conversions, and what else ranks call.

Batch norm over all rows sums statistics. The loss of what lies over groups gathers labels and,
where features are cut, the highest logits and sums of exponents. Heads of windowed attention,
version 2, sum the gradient of what they have in common. A step ends with what its strategy calls.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from workbench.plan.experiment import Experiment, ParameterServer
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS
from workbench.plan.placement import Shard
from workbench.program.buckets import Column
from workbench.program.collective_call import CollectiveCall, Phase, Summed
from workbench.program.crossing import crossing_of
from workbench.program.instructions import (
    Agree,
    Average,
    Backward,
    Convert,
    Direction,
    Forward,
    HandOut,
    Instruction,
    Loss,
    Recompute,
    Reduce,
)
from workbench.program.operations import Operation, Operations, Value
from workbench.program.rows import Counts, Rows, features
from workbench.program.sharding import moved_by

_FP32 = 4
_INT64 = 8
_FP64 = 8


class Collectives:
    """Gives the collectives of a program's instructions.

    Args:
        experiment: of the ranks that are written for.
        operations: of its plan.
        world_size: of the world, for which these ranks may stand.
    """

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
            case _:
                return ()

    def of_operation(
        self, operation: Operation, rows: Rows, phase: Direction
    ) -> Iterable[CollectiveCall]:
        """Those of a layer or a conversion in a pass.

        Args:
            operation: it.
            rows: of the pass.
            phase: which way.
        """
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
        if not hidden or choice is None or choice.scheme != "shard_heads" or choice.group_size == 1:
            return
        numel, width = self._everywhere * (3 * hidden), self.itemsize
        yield CollectiveCall(
            "all_reduce", layer.name, "backward", "shard", choice.group_size, numel, width
        )

    def of_loss(self, value: Value, rows: Rows) -> Iterator[CollectiveCall]:
        """Those of the loss of one value that the model returns.

        Args:
            value: the logits.
            rows: of the pass.
        """
        layout, _, _, _ = self.operations.layout_of(value)
        k, name = layout.group_size, value[0]
        if layout == ROWS:
            return
        yield CollectiveCall("all_gather", "labels", "step", "shard", k, rows.own, _INT64)
        if isinstance(layout.placement, Shard):
            width, every = max(_FP32, self.itemsize), rows.over(k)
            yield CollectiveCall("all_gather", name, "step", "shard", k, every, width)
            yield CollectiveCall("all_reduce", name, "step", "shard", k, 2 * every, width)

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
            "all_reduce", "gradients", "step", "replica", k, numel, width, takes, how
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
