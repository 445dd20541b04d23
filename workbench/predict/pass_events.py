"""The events of forward and backward passes over some of a program's operations."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS
from workbench.plan.mesh import shard_groups
from workbench.plan.placement import Shard
from workbench.predict import received
from workbench.predict.adding import Additions
from workbench.predict.duration import (
    Crossed,
    LayerSeconds,
    Leg,
    Seconds,
    conversion_seconds,
    half_goes_back,
    leg_seconds,
    loss_seconds,
)
from workbench.predict.events import Call, Grouping, Script
from workbench.predict.layer_times import LayerTimes
from workbench.predict.replicas import Replicas
from workbench.program.collectives import trained_hidden
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Rows, features
from workbench.program.step import Program

_FP32 = 4
_INT64 = 8
# What synchronized statistics cost beside a fused kernel, in passes over the activation.
_NORM_FORWARD, _NORM_BACKWARD = 9, 13
ADDED = 3  # two gradients of one value are read, and their sum is written

Settle = Callable[[Layer], None]


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

    def forward(
        self, operations: Iterable[Operation], ahead: Mapping[Value, int] | None = None
    ) -> None:
        """Runs operations forward.

        Args:
            operations: in order.
            ahead: handles of the gathers that have been started, by what they give.
        """
        for operation in operations:
            if operation.step is not None:
                crossed = self._conversion(operation)
                self.script.work("forward", operation.label, crossed.forward_s)
                handle = None if ahead is None else ahead.get(operation.gives)
                if handle is not None:
                    self.script.join(handle, operation.label)
                elif crossed.forward is not None:
                    self._meet(crossed.forward, operation, "forward")
            elif (layer := operation.layer) is not None and operation.itemsize > 0:
                self._forward(operation, layer)

    def start_gathers(self, operations: Iterable[Operation]) -> dict[Value, int]:
        """Starts the gathers of rows among some operations, where ranks of no host share memory.

        Within a host a gather takes no longer than what would start it.
        """
        handles = {}
        for operation in operations:
            step = operation.step
            if step is None or not step.name.startswith("all_gather_rows"):
                continue
            meeting = self.speeds.shard_group(0, step.group_size)
            leg = self._conversion(operation).forward
            if leg is not None and not (meeting.memory and len(meeting.hosts) == 1):
                call = self._call(leg, operation.label, "forward", step.group_size)
                handles[operation.gives] = self.script.start(call)
        return handles

    def backward(self, operations: Sequence[Operation], settle: Settle, *, adds: bool) -> None:
        """Runs operations backward.

        Args:
            operations: in the order of the forward pass.
            settle: told of each layer whose gradients are there.
            adds: whether weights have gradients from earlier passes.
        """
        readers = _readers(operations)
        again: set[int] = set()
        for operation in reversed(operations):
            if not operation.needs_gradient or operation.itemsize == 0:
                continue
            segment = operation.segment
            if segment is not None and segment not in again:
                again.add(segment)
                self._again([one for one in operations if one.segment == segment])
            more = readers.get(operation.gives, 1) - 1
            if more > 0 and self._is_estimated(operation):
                self.script.work("backward", operation.label, self._sum(operation, more))
            if operation.step is not None:
                crossed = self._conversion(operation)
                if crossed.backward is not None:
                    self._meet(crossed.backward, operation, "backward")
                self.script.work("backward", operation.label, crossed.backward_s)
            elif operation.layer is not None:
                self._backward(operation, operation.layer)
                if adds and operation.layer.weights:
                    seconds = self._additions.seconds(operation.layer)
                    self.script.work("backward", operation.label, seconds)
                settle(operation.layer)

    def _again(self, operations: Sequence[Operation]) -> None:
        """A segment runs once more, which costs something for each layer besides."""
        self.forward(operations)
        count = sum(one.layer is not None and one.itemsize > 0 for one in operations)
        each = self.speeds.each("recomputed_s")
        self.script.work("forward", operations[0].label, count * each)

    def loss(self) -> None:
        """The loss of what the program returns, and its gradient."""
        for value in self.program.operations.results:
            layout, _, _, _ = self.program.operations.layout_of(value)
            k, name = layout.group_size, value[0]
            logits = self._size(value)
            if layout != ROWS:
                groups = shard_groups(k, self.rows.world_size)
                labels = received.all_gather(self.rows.own * _INT64, groups).bytes
                self._of_loss("all_gather", "labels", labels, k)
                if isinstance(layout.placement, Shard):
                    width, every = max(_FP32, self.program.itemsize), self.rows.over(k)
                    highest = received.all_gather(every * width, groups).bytes
                    self._of_loss("all_gather", name, highest, k)
                    sums = self.speeds.summing.waited_for(2 * every, groups, width).bytes
                    self._of_loss("all_reduce", name, sums, k)
            seconds = loss_seconds(logits, self.speeds)
            self.script.work("loss", name, seconds)
            self.script.work("backward", "loss", seconds)

    def _forward(self, operation: Operation, layer: Layer) -> None:
        if layer.kind == "parameter":
            return
        self.script.work("forward", layer.name, self._seconds(operation, layer).forward)
        if self.plan.synchronizes(layer):
            self._normalize(operation, layer, "forward", _NORM_FORWARD)

    def _backward(self, operation: Operation, layer: Layer) -> None:
        if layer.kind == "parameter":
            return
        found = self._seconds(operation, layer)
        seconds = found.backward
        if found.estimated and half_goes_back(self.plan.graph, layer, bool(operation.wanted)):
            seconds = seconds / 2
        self.script.work("backward", layer.name, seconds)
        if self.plan.synchronizes(layer):
            if operation.wanted:
                self._normalize(operation, layer, "backward", _NORM_BACKWARD)
        elif layer.kind == "attention":
            self._attend(layer)

    def _is_estimated(self, operation: Operation) -> bool:
        """Whether gradients that are added up are not part of what was measured."""
        layer = operation.layer
        return (
            layer is None or layer.kind == "parameter" or self._seconds(operation, layer).estimated
        )

    def _sum(self, operation: Operation, more: int) -> Seconds:
        """Seconds to add so many further gradients of what an operation gives to the first one."""
        key = operation.look, more
        if key not in self._sums:
            size = self._size(operation.gives) * (ADDED * more)
            self._sums[key] = self.speeds.streaming(size, more)
        return self._sums[key]

    def _normalize(self, operation: Operation, layer: Layer, phase: str, passes: int) -> None:
        """Two sums of statistics over all that have the same channels."""
        read = self.plan.flow.inputs[layer.name]
        channels = features(read, layer.input_shape[:1], self.rows.world_size)
        width = max(operation.itemsize, _FP32)
        if self._seconds(operation, layer).estimated:
            more = self.speeds.streaming(self._size(operation.gives) * passes, passes)
            self.script.work("forward" if phase == "forward" else "backward", layer.name, more)
        if self.replicas.count(read.group_size) == 1:
            return
        for numel in (channels + 1, channels):
            call = self.replicas.all_reduce(
                numel * width, width, read.group_size, layer.name, phase=phase
            )
            self.script.meet(call)

    def _attend(self, layer: Layer) -> None:
        """The gradient that heads of windowed attention, version 2, have in common."""
        choice = self.plan.layers.get(layer.name)
        hidden = trained_hidden(layer)
        if not hidden or choice is None or choice.scheme != "shard_heads" or choice.group_size == 1:
            return
        groups = shard_groups(choice.group_size, self.rows.world_size)
        numel = np.full_like(self.rows.own, 3 * hidden)
        got = self.speeds.summing.waited_for(numel, groups, self.program.itemsize)
        leg = leg_seconds("all_reduce", got.bytes, choice.group_size, self.speeds)
        self.script.meet(self._call(leg, layer.name, "backward", choice.group_size))

    def _of_loss(self, op: str, label: str, size: Counts, group_size: int) -> None:
        leg = leg_seconds(op, size, group_size, self.speeds)
        self.script.meet(self._call(leg, label, "step", group_size))

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


def _readers(operations: Sequence[Operation]) -> dict[Value, int]:
    """How many operations hand a gradient back for each value."""
    found: dict[Value, int] = {}
    for operation in operations:
        if operation.needs_gradient:
            for value in operation.reads:
                found[value] = found.get(value, 0) + 1
    return found
