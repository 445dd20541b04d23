"""The events of forward and backward passes over some of a program's operations.

Each further gradient of a layer in a step is made in new memory and added to the first: three
passes over it. The first one was copied into its bucket instead, in two passes, which the layer's
time contains; but a large linear layer writes it there directly, and some parameters are in no
bucket.

Source: `torch.autograd`'s AccumulateGrad; the workbench's GradientSum and Linear.

Equal layers are timed once, since deep models repeat their blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.plan.graph.graph import Layer
from workbench.plan.plans.plan import Plan
from workbench.predict.time.duration import (
    Crossed,
    LayerSeconds,
    Leg,
    Seconds,
    Speeds,
    conversion_seconds,
    half_goes_back,
    layer_seconds,
    leg_seconds,
    loss_seconds,
)
from workbench.predict.time.events import Call, Grouping, Script
from workbench.predict.time.replicas import Replicas
from workbench.predict.traffic.received import received_of
from workbench.program.buckets import KEEPS_GRADIENT_BYTES
from workbench.program.collectives import CollectiveCall
from workbench.program.instructions import Direction
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Rows
from workbench.program.step import Program


class Additions:
    """Times the accumulation of weight gradients.

    Args:
        program: the program of the simulated ranks.
        speeds: the devices and links of these ranks.
    """

    def __init__(self, program: Program, speeds: Speeds) -> None:
        self.program, self.speeds = program, speeds

    def seconds(self, layer: Layer) -> Seconds:
        """Seconds to accumulate the gradients of one layer's weights, on each rank [ranks]."""
        found = np.zeros(self.program.plan.world_size)
        for place, weight in enumerate(layer.weights):
            if weight.trainable:
                size = self.program.pieces.sizes[weight.name]
                in_bucket = weight.name in self.program.buckets.names
                found = found + addition(layer, place, size, in_bucket, self.speeds)
        return found


class LayerTimes:
    """The times of a plan's layers, and how certain they are.

    Args:
        plan: the plan that places the layers.
        precision: the precision of the experiment.
        speeds: the devices and links of the ranks.

    Attributes:
        estimated: the names of layers whose shapes the machine has not measured.
    """

    def __init__(self, plan: Plan, precision: str, speeds: Speeds) -> None:
        self.plan, self.precision, self.speeds = plan, precision, speeds
        self.estimated: dict[str, None] = {}
        self._known: dict[tuple[int, Rows], _Times] = {}

    def of(self, operation: Operation, layer: Layer, rows: Rows) -> LayerSeconds:
        """The time of one layer's forward and backward pass; to be called once for each pass.

        Args:
            operation: the operation that runs the layer.
            layer: the layer, of the plan's graph.
            rows: the rows of the pass, one object for each pass.
        """
        key = operation.look, rows
        known = self._known.get(key)
        if known is None:
            found = layer_seconds(self.plan, layer, rows, self.precision, self.speeds)
            known = self._known[key] = _Times(found)
        known.often += 1
        if known.seconds.estimated:
            self.estimated.setdefault(layer.name)
        return known.seconds

    @property
    def error(self) -> float:
        """Relative half width of the error band around the sum of all layers' times.

        Errors of measurements are independent of each other; estimates may all err in one
        direction.
        """
        seconds = squared = guessed = 0.0
        for known in self._known.values():
            found = known.seconds
            seconds += known.often * found.total
            if found.estimated:
                guessed += known.often * found.weighed
            else:
                squared += known.often * found.weighed**2
        return (math.sqrt(squared) + guessed) / seconds if seconds else 0.0


class PassEvents:
    """Writes the events of a pass of so many rows.

    Args:
        program: the program of the simulated ranks.
        replicas: the replica groups of these ranks.
        script: the script that events are written to.
        rows: the rows of each rank in the pass.
        times: the times of the plan's layers.
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
        """Writes the forward pass of a layer."""
        layer = operation.layer
        assert layer is not None
        self.script.work("forward", layer.name, self._seconds(operation, layer).forward)
        self._communicate(operation, layer, "forward", _NORM_FORWARD)

    def convert(self, operation: Operation, begun: int | None = None) -> None:
        """Writes a conversion, or the wait for one that was started.

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
        """Starts a gather of rows, unless all ranks share memory; whether it was started.

        Within a host a gather takes no longer than starting it would.
        """
        assert operation.step is not None
        topology = self.speeds.shard_group(0, operation.step.group_size)
        leg = self._conversion(operation).forward
        if leg is None or (topology.memory and len(topology.hosts) == 1):
            return False
        call = self._call(leg, operation.label, "forward", operation.step.group_size)
        self.script.start(call, handle)
        return True

    def backward(self, operation: Operation, gradients: int, *, adds: bool) -> None:
        """Writes the backward pass of a layer.

        Args:
            operation: the layer.
            gradients: the number of gradients that come back for the layer's output.
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
        """Writes the backward pass of a conversion.

        Args:
            operation: the conversion.
            gradients: the number of gradients that come back for the conversion's output.
        """
        self._sum(operation, gradients)
        crossed = self._conversion(operation)
        if crossed.backward is not None:
            self._meet(crossed.backward, operation, "backward")
        self.script.work("backward", operation.label, crossed.backward_s)

    def again(self, operations: Sequence[Operation]) -> None:
        """Writes the recomputation of a segment, which has a cost for each layer besides."""
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
        """Writes the loss of the program's outputs, and its gradient."""
        for value in self.program.operations.results:
            for call in self.collectives.of_loss(value, self.rows):
                self._of_shards(call)
            seconds = loss_seconds(self._size(value), self.speeds)
            self.script.work("loss", value[0], seconds)
            self.script.work("backward", "loss", seconds)

    def _is_estimated(self, operation: Operation) -> bool:
        """Whether adding output gradients is missing from the layer's measured time."""
        layer = operation.layer
        return (
            layer is None or layer.kind == "parameter" or self._seconds(operation, layer).estimated
        )

    def _sum(self, operation: Operation, gradients: int) -> None:
        """Adds the further gradients of an operation's output to the first one."""
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
        """Writes a layer's collectives, and the passes of a batch norm over the activation."""
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


_ADDED, _COPIED = 3, 2


def addition(layer: Layer, place: int, size: Counts, in_bucket: bool, speeds: Speeds) -> Seconds:
    """Seconds to add a further gradient of one weight to the first one, on each rank [ranks].

    Args:
        layer: the layer that the weight belongs to.
        place: the index of the weight among the layer's weights.
        size: bytes of the weight on each rank [ranks].
        in_bucket: whether the weight's gradient is in a bucket.
        speeds: the devices and links of the ranks.
    """
    keeps = layer.kind == "linear" and place == 0
    copied = in_bucket & ~(keeps & (size >= KEEPS_GRADIENT_BYTES))
    return speeds.streaming(size * (_ADDED - _COPIED * copied))


@dataclass
class _Times:
    """The time of equal layers, and how many of them there are."""

    seconds: LayerSeconds
    often: int = 0


# What synchronised statistics cost besides a fused kernel, in passes over the activation.
_NORM_FORWARD, _NORM_BACKWARD = 9, 13

ADDED = 3  # two gradients of one value are read, and their sum is written
