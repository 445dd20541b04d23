"""The tensors of one step on every rank, instruction by instruction of its program.

It is a step in the middle of a run: the optimizer has its state, and gradients that are kept
from step to step are there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from workbench.plan.graph.graph import sample_bytes
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import Shard
from workbench.predict.memory.gradients import Gradients, ReductionBuffers
from workbench.predict.memory.passes import PassMemory, Tape
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
from workbench.predict.memory.timeline import MemoryTimeline
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
from workbench.program.operations import Value
from workbench.program.rows import Counts, Representatives, Rows
from workbench.program.step import MANY_RANKS, Program, reduced

_INT64 = 8
_FP32 = 4
_FP64 = 8
_PART = 2**18  # elements of a gradient whose norm is taken at once

_Way = Literal["forward", "loss", "backward", "step"]


def timeline_of(program: Program, machine: Machine | None = None) -> MemoryTimeline:
    """The tensors of one step of an experiment, on all ranks.

    Args:
        program: the program of the experiment.
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
