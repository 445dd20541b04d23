"""The tensors of one step on every rank, instruction by instruction of its program.

It is a step in the middle of a run: the optimizer has its state, and gradients that are kept
from step to step are there.

A value lives from the operation that gives it to the last one that reads it, and beyond that while
autograd saves it. The backward pass goes through the operations in reverse: each makes the
gradients of its inputs beside that of its output, then frees what it saved. Gradients from several
readers are added in the first one's memory, unless something else holds that.

Of a recomputed segment only the inputs are saved. Once the gradients of its outputs are there, it
runs forward again, and then backward; its inputs stay until that is done.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np

from workbench.plan.graph.graph import sample_bytes
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import Shard
from workbench.predict.memory.execution import Execution, is_parameter
from workbench.predict.memory.gradients import Gradients, ReductionBuffers
from workbench.predict.memory.resident import (
    averaging_bytes,
    flying_bytes,
    library_bytes,
    moved_bytes,
    optimizer_bytes,
    remembered_bytes,
    residual_bytes,
    staging_bytes,
    sums_bytes,
    weight_bytes,
)
from workbench.predict.memory.timeline import MemoryTimeline, Phase
from workbench.predict.memory.workspaces import Workspaces
from workbench.program.buckets import Column, moved_by
from workbench.program.instructions import (
    Adjust,
    Agree,
    Average,
    Backward,
    Clip,
    Convert,
    Correct,
    Forward,
    HandOut,
    Instruction,
    KeepWeights,
    Load,
    Loss,
    Pass,
    Prefetch,
    Recompute,
    Reduce,
    Update,
    Wait,
    ZeroGrad,
)
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Representatives, Rows
from workbench.program.step import MANY_RANKS, Program, reduced


@dataclass
class Segment:
    """Operations that run again in the backward pass, and their saved inputs."""

    operations: tuple[Operation, ...]
    inputs: dict[Value, int]


@dataclass
class Tape:
    """The state that a forward pass leaves for its backward pass.

    Attributes:
        kept: the tensors that each operation saves, in order; segments stand where they run.
        again: the segment that has been recomputed, and the tape of that; None: there is none.
    """

    kept: list[tuple[Operation, list[int]] | Segment] = field(default_factory=list)
    results: dict[Value, int] = field(default_factory=dict)
    again: "tuple[Segment, Tape] | None" = None


class PassMemory:
    """The memory of a pass over some of a program's operations."""

    def __init__(
        self,
        program: Program,
        timeline: MemoryTimeline,
        gradients: Gradients,
        rows: Rows,
        workspaces: Workspaces,
    ) -> None:
        self.program, self.timeline = program, timeline
        self.gradients, self.rows = gradients, rows
        self._execution = Execution(program, timeline, gradients, rows, workspaces)

    def forward(
        self,
        operations: Iterable[Operation],
        given: Mapping[Value, int],
        wanted: Sequence[Value],
        phase: Phase = "forward",
    ) -> Tape:
        """Runs operations forward.

        Args:
            operations: the operations, in order.
            given: the tensors of values that exist already; their memory is the caller's.
            wanted: the values to keep until the tape is dropped.
        """
        chosen = [operation for operation in operations if _has_memory(operation)]
        readers: dict[Value, int] = {}
        for value in wanted:
            readers[value] = readers.get(value, 0) + 1
        for operation in chosen:
            for value in _each(operation.reads):
                readers[value] = readers[value] + 1 if value in readers else 1
        alive = {value: self.timeline.hold(tensor) for value, tensor in given.items()}
        tape, casts = Tape(), list[int]()
        for run in _by_segment(chosen):
            segment = None
            if run[0].segment is not None and any(operation.needs_gradient for operation in run):
                inputs = {v: alive[v] for v in _read_inside(run) if v in alive}
                held = {value: self.timeline.hold(tensor) for value, tensor in inputs.items()}
                segment = Segment(tuple(run), held)
                tape.kept.append(segment)
            for operation in run:
                self.timeline.at(phase, operation.label)
                tensor, kept = self._execution.run(operation, alive)
                alive[operation.gives] = tensor
                if segment is not None:
                    casts += self._forget(operation, kept)
                elif operation.needs_gradient:
                    tape.kept.append((operation, kept))
                self._pass_on(operation, alive, readers)
        for value in [v for v in alive if v not in wanted]:
            self.timeline.drop(alive.pop(value))
        for tensor in casts:
            self.timeline.drop(tensor)
        tape.results = alive
        return tape

    def backward(self, tape: Tape, operation: Operation, grads: dict[Value, int]) -> None:
        """Runs the last operation of a tape backward.

        Args:
            tape: the tape of `forward`; what the operation saved is freed.
            operation: the operation; the gradients of a parameter are there when all its readers
                have given theirs.
            grads: the gradients of values; those of the operation's inputs replace that of its
                output.
        """
        if not _has_memory(operation):
            return
        entry = (tape if tape.again is None else tape.again[1]).kept.pop()
        assert not isinstance(entry, Segment)
        ran, kept = entry
        assert ran.gives == operation.gives, f"{ran.label} is not {operation.label}"
        self.timeline.at("backward", ran.label)
        if ran.step is not None:
            self.gradients.arriving.finish()
        given = grads.pop(ran.gives, None)
        of_weights = {} if given is None else self._execution.run_back(ran, given, grads)
        for tensor in kept:
            self.timeline.drop(tensor)
        if of_weights:
            self.gradients.settle(of_weights)
        if tape.again is not None and not tape.again[1].kept:
            for tensor in tape.again[0].inputs.values():
                self.timeline.drop(tensor)
            tape.again = None

    def size(self, value: Value, itemsize: int | None = None) -> Counts:
        """Bytes of a value on each rank [ranks]."""
        return self._execution.size(value, itemsize)

    def recompute(self, tape: Tape) -> None:
        """Runs the last segment of a tape forward once more."""
        segment = tape.kept.pop()
        assert isinstance(segment, Segment)
        operations = [operation._replace(segment=None) for operation in segment.operations]
        outputs = _read_outside(self.program, segment.operations)
        self.timeline.at("recompute", operations[0].label)
        buffers = self.timeline.make(self._buffers(operations), "workspace", operations[0].label)
        again = self.forward(operations, segment.inputs, outputs, "recompute")
        for tensor in (*again.results.values(), buffers):
            self.timeline.drop(tensor)
        tape.again = segment, again

    def _buffers(self, operations: Iterable[Operation]) -> Counts:
        """Bytes of copies of running statistics [ranks], so that a batch counts once."""
        pieces, total = self.program.pieces, np.zeros_like(self.rows.own)
        for operation in operations:
            for weight in operation.layer.weights if operation.layer is not None else ():
                if not (weight.trainable or weight.frozen):
                    total = total + pieces.sizes[weight.name]
        return total

    def _forget(self, operation: Operation, kept: list[int]) -> list[int]:
        """Frees what an operation of a segment saves; autocast still caches the weights it cast."""
        for tensor in kept:
            self.timeline.drop(tensor)
        cast = self._execution.casts(operation)
        return [self.timeline.make(size, "activations", operation.label) for size in cast]

    def _pass_on(
        self, operation: Operation, alive: dict[Value, int], readers: dict[Value, int]
    ) -> None:
        """Drops the tensors of values that have no reader left."""
        for value in _each(operation.reads):
            readers[value] -= 1
            if readers[value] == 0 and value in alive:
                self.timeline.drop(alive.pop(value))
        if operation.gives not in readers:
            self.timeline.drop(alive.pop(operation.gives))


def _each(reads: tuple[Value, ...]) -> Iterable[Value]:
    """Every value that is read, once."""
    return reads if len(reads) == 1 else dict.fromkeys(reads)


def _has_memory(operation: Operation) -> bool:
    """Whether an operation gives a new tensor: no size, and no parameter."""
    return operation.itemsize > 0 and not is_parameter(operation)


def _by_segment(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Operations of one segment together, others one by one."""
    for segment, run in groupby(operations, lambda operation: operation.segment):
        if segment is None:
            yield from ([operation] for operation in run)
        else:
            yield list(run)


def _read_inside(run: Sequence[Operation]) -> list[Value]:
    """The values that these operations read and do not give."""
    given = {operation.gives for operation in run}
    reads = dict.fromkeys(value for operation in run for value in operation.reads)
    return [value for value in reads if value not in given]


def _read_outside(program: Program, run: Sequence[Operation]) -> list[Value]:
    """The values that these operations give and others read."""
    given = {operation.gives for operation in run}
    others = (operation for operation in program.operations if operation.gives not in given)
    read = {value for operation in others for value in operation.reads} | set(
        program.operations.results
    )
    return [operation.gives for operation in run if operation.gives in read]


_INT64 = 8
_FP32 = 4
_FP64 = 8
_PART = 2**18  # elements of a gradient whose norm is taken at once

_Way = Literal["forward", "loss", "backward", "step"]


def timeline_of(program: Program, machine: Machine | None = None) -> MemoryTimeline:
    """The tensors of one step of an experiment, on all ranks.

    Args:
        machine: the machine, for the workspace of its devices' kernels; None: it is not known.
    """
    return _Step(program, machine).written()


class _Step:
    """The step, of a large world on the ranks that represent it."""

    def __init__(self, program: Program, machine: Machine | None) -> None:
        self.whole, world = program, program.plan.world_size
        standing = None
        if world > MANY_RANKS:
            devices = None  # one, or none that is known: all ranks have the same
            if machine is not None and len(machine.devices) > 1:
                devices = machine.replace(ranks_per_host=None)
            standing = Representatives.of(program.experiment, devices)
            program = reduced(program.experiment, standing)
        self.program, self.pieces = program, program.pieces
        self.timeline = MemoryTimeline(world, standing)
        ranks = range(world) if standing is None else standing.ranks.tolist()
        self.workspaces = Workspaces(machine, ranks, program.experiment.precision)
        self._machine, self._ranks = machine, ranks
        self._own_gpus = machine is not None and machine.own_gpus
        self.arriving = ReductionBuffers(self.whole, self.timeline, own_gpus=self._own_gpus)
        self.gradients = Gradients(program, self.timeline, self.arriving)
        self._passes: dict[Rows, PassMemory] = {}
        self._tapes: dict[Pass, Tape] = {}
        self._grads: dict[Pass, dict[Value, int]] = {}
        self._boundaries: dict[Value, int] = {}  # inputs of the current micro-batch's rounds
        self._left: dict[Value, int] = {}  # by what runs once in it
        self._results: list[int] = []  # of the micro-batch before
        self._given: list[int] = []  # of the current one
        self._under_way = 0

    def written(self) -> MemoryTimeline:
        self._reside()
        batches = len(self.program.ranks.batches)
        seen = {0, 1, batches - 1}  # others find what the second one finds, and are no larger
        for way, on, run in _runs(self.program.instructions):
            if on is None:
                for instruction in run:
                    self._execute(instruction)
            elif on.micro_batch in seen:
                if on.micro_batch != self._under_way:
                    self._end_micro_batch()
                    self._under_way = on.micro_batch
                self._pass(way, on, run)
        return self.timeline

    def _reside(self) -> None:
        """Writes the memory that stays from step to step."""
        timeline, whole = self.timeline, self.whole
        timeline.reside("weights", weight_bytes(self.pieces))
        timeline.reside("optimizer", self._of_optimizer())
        timeline.reside("optimizer", remembered_bytes(self.whole, self.pieces))
        timeline.reside("in_flight", flying_bytes(self.program))
        timeline.reside("codec", residual_bytes(self.program))
        timeline.reside("gradients", self.gradients.resident())
        if self._machine is not None:
            kept = library_bytes(self._machine, self._ranks)
            timeline.reside("workspace", {"libraries": kept})
        if not self._own_gpus:
            timeline.reside("buckets", {"sums of gradients": sums_bytes(whole, whole.buckets)})
            timeline.reside("staging", {"staging": staging_bytes(whole)})
        self.gradients.left_by_last_step()

    def _of_optimizer(self) -> Mapping[str, Counts]:
        return optimizer_bytes(self._updating, self._updating.handed)

    @property
    def _labels(self) -> int:
        """The labels of one sample."""
        return math.prod(self.program.plan.graph.label_shape)

    @property
    def _updating(self) -> Program:
        """What tells who updates what; where sharded, it depends on how many ranks there are."""
        return self.whole if self.whole.experiment.shard_optimizer else self.program

    def _norm(self, names: Sequence[str]) -> None:
        """Writes the parts of gradients that are made wide, one by one."""
        itemsize = self.program.itemsize
        moved = moved_bytes(self._updating, self._updating.handed) if itemsize < _FP64 else {}
        for name in names if moved else ():
            room = np.minimum(moved[name] // itemsize, _PART) * _FP64
            self.timeline.pass_by(room, "workspace", self.pieces.owners[name])

    def _update(self, names: Sequence[str]) -> None:
        """Writes the temporary tensors of an update, parameter by parameter."""
        values = self.program.experiment.optimizers
        rooms = {name: values[name].workspace for name in names}
        if not any(rooms.values()):
            return
        moved = moved_bytes(self._updating, self._updating.handed)
        for name in names:
            room = rooms[name] * moved[name]
            self.timeline.pass_by(room, "workspace", self.pieces.owners[name])

    def _execute(self, instruction: Instruction) -> None:
        timeline = self.timeline
        match instruction:
            case Load(rows):
                sample = sample_bytes(self.program.plan.graph.inputs, self.program.itemsize)
                per_row = sample + self._labels * _INT64
                timeline.make(rows.own * per_row, "data", "input")
            case ZeroGrad(names, every) if every == 1:
                self.gradients.begin(set(names))
            case KeepWeights(names):
                for name in names:
                    size, owner = self.pieces.sizes[name], self.pieces.owners[name]
                    timeline.make(size, "in_flight", owner)
            case Wait():
                timeline.at("step")
                self.arriving.finish()
            case Agree():
                self._end_micro_batch()
                timeline.at("step")
            case Reduce():
                self.arriving.begin(
                    replace(instruction, column=self._everywhere(instruction.column))
                )
            case Adjust(names) | Correct(names):
                self._own_rule(names)
            case Clip(names, norm=float()):
                self._norm(names)
            case Update(names):
                self.arriving.finish()
                self._update(names)
            case Average(buckets):
                timeline.pass_by(averaging_bytes(buckets), "buckets", "parameters")
            case HandOut():
                self._hand_out(instruction)

    def _own_rule(self, names: Sequence[str]) -> None:
        """Writes what a strategy's own rule makes beside each parameter, one by one."""
        copies = self.program.experiment.sync.timing.temporaries
        for name in names:
            room = copies * self.pieces.sizes[name]
            self.timeline.pass_by(room, "workspace", self.pieces.owners[name])

    def _hand_out(self, hand_out: HandOut) -> None:
        """Writes the all-gather of updated weights: the bucket, and beside it this rank's part.

        A fused update gathers in its own buckets, and a server sends in those of the gradients.
        """
        if hand_out.fused or hand_out.source == "server":
            return
        self.timeline.at("step")
        shares = self.whole.experiment.optimizer_shares
        for column in map(self._everywhere, hand_out.buckets.columns()):
            moved = moved_by(column, self.program.itemsize, shares)
            own = sum(moved.values(), np.zeros_like(column.bytes))
            self.timeline.pass_by((own + column.bytes) * column.there, "buckets", "parameters")

    def _everywhere(self, column: Column) -> Column:
        """The same bucket on all ranks of the world."""
        return replace(column, place=self.whole.buckets.place)

    def _pass(self, way: _Way, on: Pass, run: Sequence[Instruction]) -> None:
        """Writes instructions of a pass that go in one direction."""
        match way:
            case "forward":
                self._forward(on, run)
            case "loss":
                self._loss(on)
            case "backward":
                self._backward(on, run)

    def _forward(self, on: Pass, run: Sequence[Instruction]) -> None:
        given = {value: self._boundary(value, on) for value in on.reads}
        operations = [one.operation for one in run if isinstance(one, Forward | Convert)]
        self._tapes[on] = self._running(on).forward(operations, given, on.gives)
        if on.round is None:
            self._left = self._tapes[on].results

    def _boundary(self, value: Value, on: Pass) -> int:
        """The tensor that all rounds of a micro-batch read, with room for its gradient."""
        if value not in self._boundaries:
            images = self.timeline.make(np.zeros_like(on.rows.own), "data", "input")
            self._boundaries[value] = self._left.get(value, images)
            if self.program.operations.needs_gradient(value):
                (head,) = (one for one in self._tapes if value in one.gives)
                size = self._running(head).size(value)
                gathered = self.timeline.make(size, "activation_gradients", value[0])
                self._grads[head] = {value: gathered}
        return self._boundaries[value]

    def _loss(self, on: Pass) -> None:
        """Writes the loss, and the gradients of the model's outputs."""
        timeline, running, held = self.timeline, self._running(on), []
        operations, grads = self.program.operations, dict[Value, int]()
        timeline.at("loss")
        for value in operations.results:
            layout, _, _, _ = operations.layout_of(value)
            wide = running.size(value, max(_FP32, self.program.itemsize))
            if layout.group_size > 1:
                labels = running.rows.over(layout.group_size) * (self._labels * _INT64)
                held.append(timeline.make(labels, "activations", "loss"))
            held.append(timeline.make(wide, "activations", "loss"))
        timeline.at("backward", "loss")
        for value in operations.results:
            layout, _, _, _ = operations.layout_of(value)
            wide = running.size(value, max(_FP32, self.program.itemsize))
            beside = 1 if isinstance(layout.placement, Shard) else 2  # of scores and of their log
            if operations.needs_gradient(value):
                timeline.pass_by(beside * wide, "workspace", "loss")
                grads[value] = timeline.make(running.size(value), "activation_gradients", "loss")
        for tensor in held:
            timeline.drop(tensor)
        self._grads[on] = grads

    def _backward(self, on: Pass, run: Sequence[Instruction]) -> None:
        """Writes a backward pass; the gradients of its inputs are gathered from all rounds."""
        tape, running, timeline = self._tapes.pop(on), self._running(on), self.timeline
        grads = self._grads.pop(on)
        gathered = [] if on.from_loss else [timeline.hold(tensor) for tensor in grads.values()]
        for instruction in run:
            match instruction:
                case Recompute():
                    running.recompute(tape)
                case Backward(operation) | Convert(operation):
                    running.backward(tape, operation, grads)
                case Reduce():
                    self._execute(instruction)
        for tensor in (*gathered, *grads.values()):
            timeline.drop(tensor)
        if on.from_loss:
            self._given += tape.results.values()

    def _end_micro_batch(self) -> None:
        """Frees what the micro-batch's rounds read, and the results of the one before."""
        for tensor in (*self._boundaries.values(), *self._results):
            self.timeline.drop(tensor)
        self._results, self._given = self._given, []
        self._boundaries = {}

    def _running(self, on: Pass) -> PassMemory:
        if on.rows not in self._passes:
            self._passes[on.rows] = PassMemory(
                self.program, self.timeline, self.gradients, on.rows, self.workspaces
            )
        return self._passes[on.rows]


def _runs(
    instructions: Sequence[Instruction],
) -> Iterator[tuple[_Way, Pass | None, list[Instruction]]]:
    """Instructions of one pass and direction, together; others one by one.

    Reductions that begin between backward instructions are among these; a prefetched gather takes
    no memory of its own.
    """
    way: _Way = "step"
    on: Pass | None = None
    run: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Prefetch) or (
            isinstance(instruction, Reduce) and way == "backward"
        ):
            run += [instruction] if isinstance(instruction, Reduce) else []
            continue
        own = _way(instruction)
        if own != (way, on) or on is None:
            if run:
                yield way, on, run
            (way, on), run = own, []
        run.append(instruction)
    yield way, on, run


def _way(instruction: Instruction) -> tuple[_Way, Pass | None]:
    match instruction:
        case Forward(_, on) | Convert(_, on, "forward"):
            return "forward", on
        case Backward(_, on) | Convert(_, on, "backward") | Recompute(_, _, on):
            return "backward", on
        case Loss(_, on):
            return "loss", on
        case _:
            return "step", None
