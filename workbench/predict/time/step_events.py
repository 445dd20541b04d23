"""The events of one step in time, instruction by instruction of its program.

Each further gradient of a layer in a step is made in new memory and added to the first: three
passes over it. The first one was copied into its bucket instead, in two passes, which the layer's
time contains; but a large linear layer writes it there directly, and some parameters are in no
bucket.

Source: `torch.autograd`'s AccumulateGrad; the workbench's GradientSum and Linear.

Equal layers are timed once, since deep models repeat their blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.graph.graph import Layer, sample_bytes
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
    load_seconds,
    loss_seconds,
    update_seconds,
)
from workbench.predict.time.events import Call, Event, Grouping, Script
from workbench.predict.time.replicas import Replicas, some
from workbench.predict.traffic.collective_costs import received_of
from workbench.program.buckets import KEEPS_GRADIENT_BYTES
from workbench.program.collectives import CollectiveCall, takes_part
from workbench.program.instructions import (
    Adjust,
    Agree,
    Average,
    Backward,
    Clip,
    Convert,
    Correct,
    Direction,
    Forward,
    HandOut,
    Instruction,
    Load,
    Loss,
    Prefetch,
    Recompute,
    Reduce,
    Unscale,
    Update,
    Updater,
    Wait,
    Weigh,
    turn_of,
)
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Rows
from workbench.program.step import Program


class Additions:
    """Times the accumulation of weight gradients."""

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
        """Writes a conversion, or the wait for one that was started."""
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


_ADDED, _COPIES = 3, 2


def addition(layer: Layer, place: int, size: Counts, in_bucket: bool, speeds: Speeds) -> Seconds:
    """Seconds to add a further gradient of one weight to the first one, on each rank [ranks].

    Args:
        place: the index of the weight among the layer's weights.
        size: bytes of the weight on each rank [ranks].
        in_bucket: whether the weight's gradient is in a bucket.
    """
    keeps = layer.kind == "linear" and place == 0
    copied = in_bucket & ~(keeps & (size >= KEEPS_GRADIENT_BYTES))
    return speeds.streaming(size * (_ADDED - _COPIES * copied))


@dataclass
class _Times:
    """The time of equal layers, and how many of them there are."""

    seconds: LayerSeconds
    often: int = 0


# What synchronised statistics cost besides a fused kernel, in passes over the activation.
_NORM_FORWARD, _NORM_BACKWARD = 9, 13

ADDED = 3  # two gradients of one value are read, and their sum is written


@dataclass(frozen=True)
class Written:
    """The events of a step, and how certain their times are.

    Attributes:
        events: the events of the step, in order.
        error: relative half width of the error band around the layers' seconds.
        estimated: the names of layers whose shapes the machine has not measured.
    """

    events: tuple[Event, ...]
    error: float
    estimated: tuple[str, ...]
    algorithms: Mapping[str, tuple[str, ...]]


def written(program: Program, speeds: Speeds, *, due: bool = True) -> Written:
    """Writes the events of a step on the simulated ranks.

    Args:
        due: whether what is done only in every few steps is done in this one.
    """
    return _Step(program, speeds, due).written()


class _Step:
    def __init__(self, program: Program, speeds: Speeds, due: bool) -> None:
        self.program, self.speeds, self.due = program, speeds, due
        self.script = Script()
        self.times = LayerTimes(program.plan, program.experiment.precision, speeds)
        self.replicas = Replicas(program.ranks, speeds)
        self.updates = Updates(program, self.replicas, self.script)
        self._passes: dict[Rows, PassEvents] = {}
        self._begun: set[int] = set()  # prefetches that are worth it

    def written(self) -> Written:
        for index, instruction in enumerate(self.program.instructions):
            if self.due or turn_of(instruction) == 1:
                self._write(index, instruction)
        self.updates.rest()
        algorithms = {label: tuple(names) for label, names in self.replicas.algorithms.items()}
        estimated = tuple(self.times.estimated)
        return Written(self.script.events(), self.times.error, estimated, algorithms)

    def _write(self, index: int, instruction: Instruction) -> None:
        match instruction:
            case Forward(operation, on):
                self._passing(on.rows).forward(operation)
            case Backward(operation, on, adds, gradients):
                self._passing(on.rows).backward(operation, gradients, adds=adds)
            case Convert(operation, on, "forward", prefetch):
                begun = prefetch if prefetch in self._begun else None
                self._passing(on.rows).convert(operation, begun)
            case Convert(operation, on, "backward", _, gradients):
                self._passing(on.rows).convert_back(operation, gradients)
            case Recompute(_, operations, on):
                self._passing(on.rows).again(operations)
            case Loss(_, on):
                self._passing(on.rows).loss()
            case Load(rows):
                self._load(rows)
            case Prefetch(operation, on):
                if self._passing(on.rows).start_gather(operation, index):
                    self._begun.add(index)
            case Reduce():
                self.updates.reduce(index)
            case Wait():
                self.updates.wait(instruction)
            case Agree():
                self.updates.agree()
            case Weigh():
                self.updates.weigh()
            case Unscale():
                self.updates.unscale(instruction)
            case Clip():
                self.updates.clip(instruction)
            case Update():
                self.updates.update(instruction)
            case HandOut():
                self.updates.hand_out(instruction)
            case Average():
                self.updates.average(instruction)
            case Adjust(names):
                self.updates.own_rule(names, "adjust")
            case Correct(names):
                self.updates.own_rule(names, "correct")

    def _load(self, rows: Rows) -> None:
        sample = sample_bytes(self.program.plan.graph.inputs, self.program.itemsize)
        self.script.work("load", "input", load_seconds(rows.own * sample, self.speeds))

    def _passing(self, rows: Rows) -> PassEvents:
        known = self._passes.get(rows)
        if known is None:
            known = PassEvents(self.program, self.replicas, self.script, rows, self.times)
            self._passes[rows] = known
        return known


_FP64 = 8

_COPIED = 4  # an average is read and written once into its bucket, and once back

_HANDED_OUT = 4

_AVERAGED = 5  # averaged weights are scaled, and weights added to them

_RULED = 3  # a rule reads a gradient and weights, and writes one of them

_SCALED = 2  # a gradient is read and written


class Updates:
    """Writes the events that concern gradients and parameters."""

    def __init__(self, program: Program, replicas: Replicas, script: Script) -> None:
        self.program, self.replicas, self.script = program, replicas, script
        self.experiment, self.speeds = program.experiment, replicas.speeds
        self.ones = np.ones(program.plan.world_size, dtype=np.int64)
        self._begun: set[int] = set()

    def reduce(self, index: int) -> None:
        """Starts the reduction of a bucket, unless it has begun or has no replicas.

        Args:
            index: the index of the instruction, under which the reduction is waited for.
        """
        reduce = self.program.instructions[index]
        assert isinstance(reduce, Reduce)
        if self.replicas.count(reduce.column.group_size) > 1 and index not in self._begun:
            self._begun.add(index)
            sizes = np.where(takes_part(reduce) > 0, reduce.column.bytes, 0)
            self.script.start(self._sum(reduce, sizes), index)

    def wait(self, wait: Wait) -> None:
        """Waits for reductions of this step, or of an earlier one.

        A reduction of this step that a later step waits for is taken to begin here, with its
        gradients: the status collective that precedes it is too small to delay it.
        """
        for index in wait.reduces if wait.late else ():
            self.reduce(index)
        for index in wait.reduces:
            if index in self._begun:
                self.script.join(index, "gradients", wait.late)

    def agree(self) -> None:
        """Writes the small status all-reduce that ends every step, before any rank updates."""
        world = self.replicas.ranks.world_size
        if world > 1:
            sizes = self.ones * (3 + world) * _FP64
            self.script.meet(self.replicas.all_reduce(sizes, _FP64, 1, "status"))

    def weigh(self) -> None:
        """Writes the all-reduce of the rows' weights."""
        if self.replicas.ranks.world_size > 1:
            self.script.meet(self.replicas.all_reduce(self.ones * _FP64, _FP64, 1, "weights"))

    def unscale(self, unscale: Unscale) -> None:
        """Writes the scaling of gradients, and the agreement that all are numbers.

        Steps are taken to be such as update weights.
        """
        mine = self._updated(unscale.parameters, unscale.by).astype(np.int64)
        self.script.work("update", "unscale", self.speeds.streaming(_SCALED * mine))
        if self.replicas.ranks.world_size > 1:
            self.script.meet(self.replicas.all_reduce(self.ones * _FP64, _FP64, 1, "unscale"))

    def clip(self, clip: Clip) -> None:
        """Writes the norm of all gradients, which ranks add up, and their scaling; or the latter.

        Steps are taken to be such as are clipped.
        """
        mine = self._updated(clip.parameters, clip.by).astype(np.int64)
        world = self.replicas.ranks.world_size
        if clip.norm is not None:
            self.script.work("update", "clip", self.speeds.streaming(mine))
            if world > 1:
                self.script.meet(self.replicas.all_reduce(self.ones * _FP64, _FP64, 1, "clip"))
        self.script.work("update", "clip", self.speeds.streaming(_SCALED * mine))

    def update(self, update: Update) -> None:
        """Writes the update of parameters."""
        optimizer = self.experiment.optimizer
        mine = self._updated(update.parameters, update.by)
        self.script.work("update", optimizer.kind, update_seconds(optimizer, mine, self.speeds))
        if self.experiment.ema is not None:
            passes = self.speeds.streaming(_AVERAGED * mine.astype(np.int64), 2)
            self.script.work("update", "ema", passes)

    def hand_out(self, hand_out: HandOut) -> None:
        """Writes the all-gather of updated parameters, bucket by bucket.

        From a server, all buckets are sent at once.
        """
        if hand_out.source == "server":
            self._send_back(hand_out)
            return
        fused, shares = hand_out.fused, self.experiment.optimizer_shares
        passes = _HANDED_OUT // 2 if fused else _HANDED_OUT
        for column in hand_out.buckets.columns():
            held = column.bytes
            self.script.work("update", "hand-out", self.speeds.streaming(passes * held))
            call = self.replicas.from_owners(held, column.group_size, shares, fused=fused)
            self.script.meet(call)

    def average(self, average: Average) -> None:
        """Writes local SGD's averaging of parameters."""
        for column in average.buckets.columns():
            sizes, k = column.bytes, column.group_size
            self.script.work("update", "averaging", self.speeds.streaming(_COPIED * sizes))
            call = self.replicas.all_reduce(
                sizes, self.program.itemsize, k, "parameters", beside=True, takes=some(sizes)
            )
            self.script.meet(call)

    def own_rule(self, names: Sequence[str], label: str) -> None:
        """Writes what a strategy makes itself of gradients or weights, which is elementwise."""
        timing = self.experiment.sync.timing
        passes = _RULED + 2 * len(timing.remembers) + timing.keeps_weights
        held = self._updated(names, "holders").astype(np.int64)
        self.script.work("update", label, self.speeds.streaming(passes * held))

    def rest(self) -> None:
        """Writes the fixed cost of every step."""
        self.script.work("step", "step", self.speeds.each("step_s"))

    def _sum(self, reduce: Reduce, sizes: Counts) -> Call:
        replicas, k = self.replicas, reduce.column.group_size
        if reduce.to == "server":
            return replicas.to_server(sizes, k, self._serves(k))
        if reduce.to == "owners":
            return replicas.to_owners(sizes, k, self.experiment.optimizer_shares)
        return replicas.all_reduce(
            sizes,
            self.program.itemsize,
            k,
            "gradients",
            algorithm=reduce.algorithm,
            beside=True,
            shared=True,
            codec=reduce.codec,
            takes=some(sizes),
        )

    def _own(self, size: Counts, k: int, by: Updater) -> Seconds:
        """Bytes of a parameter, sharded over groups of k ranks, that each rank updates [ranks]."""
        if by == "server" and self.replicas.count(k) > 1:
            return np.where(self._serves(k), size, 0.0)
        if by == "owners" and self.replicas.count(k) > 1:
            return size * self.replicas.part(k, self.experiment.optimizer_shares)
        return size.astype(np.float64)

    def _updated(self, names: Sequence[str], by: Updater) -> Seconds:
        """Bytes of these parameters that each rank updates [ranks]."""
        pieces = self.program.pieces
        known: dict[tuple[int, int], Seconds] = {}  # of the same pieces, as equal layers have them
        total = np.zeros(len(self.ones))
        for name in names:
            size = pieces.sizes[name]
            k = self.program.plan.flow.weights[name].group_size
            if (id(size), k) not in known:
                known[id(size), k] = self._own(size, k, by)
            total = total + known[id(size), k]
        return total

    def _send_back(self, hand_out: HandOut) -> None:
        totals: dict[int, Counts] = {}
        for column in hand_out.buckets.columns():
            k = column.group_size
            totals[k] = totals.get(k, 0 * column.bytes) + column.bytes
        for k, held in totals.items():
            self.script.meet(self.replicas.from_server(held, k, self._serves(k)))

    def _serves(self, group_size: int) -> NDArray[np.bool_]:
        """A mask of the ranks that update parameters which others hold too [ranks]."""
        sync = self.experiment.sync
        assert isinstance(sync, ParameterServer)
        return self.replicas.serves(sync.server, group_size)
