"""The events of forward and backward passes over some of a program's operations."""

from collections.abc import Sequence

import numpy as np

from workbench.plan.graph import Layer
from workbench.predict.time.adding import Additions
from workbench.predict.time.duration import (
    Crossed,
    LayerSeconds,
    Leg,
    Seconds,
    conversion_seconds,
    half_goes_back,
    leg_seconds,
    loss_seconds,
)
from workbench.predict.time.events import Call, Grouping, Script
from workbench.predict.time.layer_times import LayerTimes
from workbench.predict.time.replicas import Replicas
from workbench.predict.traffic.call_received import received_of
from workbench.program.collective_call import CollectiveCall
from workbench.program.instructions import Direction
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Rows
from workbench.program.step import Program

# What synchronized statistics cost beside a fused kernel, in passes over the activation.
_NORM_FORWARD, _NORM_BACKWARD = 9, 13
ADDED = 3  # two gradients of one value are read, and their sum is written


class PassEvents:
    """Writes a pass of so many rows.

    Args:
        program: of the kept ranks.
        replicas: their groups.
        script: to write on.
        rows: of the pass.
        times: of layers.
    """

    def __init__(
        self, program: Program, replicas: Replicas, script: Script, rows: Rows, times: LayerTimes
    ) -> None:
        self.program, self.replicas, self.script, self.rows = program, replicas, script, rows
        self.plan, self.speeds, self.times = program.plan, replicas.speeds, times
        self._layers: dict[str, LayerSeconds] = {}
        self._crossed: dict[Value, Crossed] = {}
        self._groupings: dict[int, Grouping] = {}
        self._sums: dict[tuple[int, int], Seconds] = {}
        self._additions = Additions(program, self.speeds)
        self.collectives = program.collectives

    def forward(self, operation: Operation) -> None:
        """Runs a layer."""
        layer = operation.layer
        assert layer is not None
        self.script.work("forward", layer.name, self._seconds(operation, layer).forward)
        self._communicate(operation, layer, "forward", _NORM_FORWARD)

    def convert(self, operation: Operation, begun: int | None = None) -> None:
        """Runs a conversion, or waits for it.

        Args:
            operation: the conversion.
            begun: the handle under which it has been started.
        """
        crossed = self._conversion(operation)
        self.script.work("forward", operation.label, crossed.forward_s)
        if begun is not None:
            self.script.join(begun, operation.label)
        elif crossed.forward is not None:
            self._meet(crossed.forward, operation, "forward")

    def start_gather(self, operation: Operation, handle: int) -> bool:
        """Starts a gather of rows, if ranks of no host share memory; gives whether it has.

        Within a host a gather takes no longer than what would start it.
        """
        assert operation.step is not None
        meeting = self.speeds.shard_group(0, operation.step.group_size)
        leg = self._conversion(operation).forward
        if leg is None or (meeting.memory and len(meeting.hosts) == 1):
            return False
        call = self._call(leg, operation.label, "forward", operation.step.group_size)
        self.script.start(call, handle)
        return True

    def backward(self, operation: Operation, gradients: int, *, adds: bool) -> None:
        """Runs a layer backward.

        Args:
            operation: the layer.
            gradients: that come back for what it gave.
            adds: whether its weights have gradients from earlier passes.
        """
        layer = operation.layer
        assert layer is not None
        self._sum(operation, gradients)
        if layer.kind != "parameter":
            found = self._seconds(operation, layer)
            seconds = found.backward
            if found.estimated and half_goes_back(self.plan.graph, layer, bool(operation.wanted)):
                seconds = seconds / 2
            self.script.work("backward", layer.name, seconds)
            self._communicate(operation, layer, "backward", _NORM_BACKWARD)
        if adds:
            self.script.work("backward", layer.name, self._additions.seconds(layer))

    def convert_back(self, operation: Operation, gradients: int) -> None:
        """Runs a conversion backward.

        Args:
            operation: the conversion.
            gradients: that come back for what it gave.
        """
        self._sum(operation, gradients)
        crossed = self._conversion(operation)
        if crossed.backward is not None:
            self._meet(crossed.backward, operation, "backward")
        self.script.work("backward", operation.label, crossed.backward_s)

    def again(self, operations: Sequence[Operation]) -> None:
        """A segment runs once more, which costs something for each layer besides."""
        count = 0
        for operation in operations:
            if operation.step is not None:
                self.convert(operation)
            elif operation.computes:
                self.forward(operation)
                count += 1
        each = self.speeds.each("recomputed_s")
        self.script.work("forward", operations[0].label, count * each)

    def loss(self) -> None:
        """The loss of what the program returns, and its gradient."""
        for value in self.program.operations.results:
            for call in self.collectives.of_loss(value, self.rows):
                self._of_shards(call)
            seconds = loss_seconds(self._size(value), self.speeds)
            self.script.work("loss", value[0], seconds)
            self.script.work("backward", "loss", seconds)

    def _is_estimated(self, operation: Operation) -> bool:
        """Whether gradients that are added up are not part of what was measured."""
        layer = operation.layer
        return (
            layer is None or layer.kind == "parameter" or self._seconds(operation, layer).estimated
        )

    def _sum(self, operation: Operation, gradients: int) -> None:
        """Adds the further gradients of what an operation gives to the first one."""
        more = gradients - 1
        if more <= 0 or not self._is_estimated(operation):
            return
        key = operation.look, more
        if key not in self._sums:
            size = self._size(operation.gives) * (ADDED * more)
            self._sums[key] = self.speeds.streaming(size, more)
        self.script.work("backward", operation.label, self._sums[key])

    def _communicate(
        self, operation: Operation, layer: Layer, phase: Direction, passes: int
    ) -> None:
        """What a layer communicates; a batch norm passes over the activation besides."""
        for index, call in enumerate(self.collectives.of_operation(operation, self.rows, phase)):
            if call.purpose == "shard":
                self._of_shards(call)
                continue
            if index == 0 and self._seconds(operation, layer).estimated:
                more = self.speeds.streaming(self._size(operation.gives) * passes, passes)
                self.script.work(phase, layer.name, more)
            if self.replicas.count(call.group_size) > 1:
                size = call.numel * call.itemsize
                self.script.meet(
                    self.replicas.all_reduce(
                        size, call.itemsize, call.group_size, call.label, phase=phase
                    )
                )

    def _of_shards(self, call: CollectiveCall) -> None:
        received = received_of(call, self.speeds.summing).bytes
        leg = leg_seconds(call.op, received, call.group_size, self.speeds)
        self.script.meet(self._call(leg, call.label, call.phase, call.group_size))

    def _meet(self, leg: Leg, operation: Operation, phase: str) -> None:
        assert operation.step is not None
        if leg.bytes.any():
            call = self._call(leg, operation.label, phase, operation.step.group_size)
            self.script.meet(call)

    def _call(self, leg: Leg, label: str, phase: str, group_size: int) -> Call:
        if group_size not in self._groupings:
            numbers = np.arange(self.rows.world_size) // group_size
            self._groupings[group_size] = Grouping(numbers)
        busy = self.speeds.shard_group(0, group_size).link.busy
        groups = self._groupings[group_size]
        return Call(leg.op, label, phase, groups, leg.seconds, leg.bytes, busy=busy)

    def _seconds(self, operation: Operation, layer: Layer) -> LayerSeconds:
        found = self._layers.get(layer.name)
        if found is None:
            found = self._layers[layer.name] = self.times.of(operation, layer, self.rows)
        return found

    def _conversion(self, operation: Operation) -> Crossed:
        assert operation.step is not None
        if operation.gives not in self._crossed:
            self._crossed[operation.gives] = conversion_seconds(
                operation.step, self.rows, operation.itemsize, self.speeds
            )
        return self._crossed[operation.gives]

    def _size(self, value: Value) -> Counts:
        layout, shape, per_sample, width = self.program.operations.layout_of(value)
        return self.rows.elements(layout, shape, per_sample) * width
