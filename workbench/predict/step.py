"""One step on every rank, from the loading of its rows to the optimizer's update.

It is a step in the middle of a run: the optimizer has its state, and gradients that are kept
from step to step are there.
"""

from collections.abc import Mapping

import numpy as np

from workbench.plan.experiment import LocalSGD, Pipelined, Synchronous
from workbench.plan.placement import Shard
from workbench.plan.tail import Tail, round_rows
from workbench.predict.gradients import Gradients
from workbench.predict.passes import Pass, Tape
from workbench.predict.resident import (
    averaging_bytes,
    flying_bytes,
    optimizer_bytes,
    residual_bytes,
    staging_bytes,
    sums_bytes,
    weight_bytes,
)
from workbench.predict.rooms import Rooms
from workbench.predict.timeline import Timeline
from workbench.program.buckets import averaged, handed_out, late, within
from workbench.program.operations import Value
from workbench.program.parameters import tail_names
from workbench.program.representatives import Representatives
from workbench.program.rows import Counts, Rows, micro_batches
from workbench.program.sharding import moved_by
from workbench.program.step import Program, reduced

_INT64 = 8
_MANY = 64  # ranks: beyond, few of them stand for all
_FP32 = 4


def timeline_of(program: Program) -> Timeline:
    """The tensors of one step of an experiment, on all ranks."""
    return _Step(program).written()


class _Step:
    """Of a large world, passes are those of the ranks that stand for it."""

    def __init__(self, program: Program) -> None:
        self.whole, world = program, program.plan.world_size
        self.buckets = self.handed = program.buckets
        if late(program.experiment):
            self.handed = handed_out(program.experiment, program.pieces)
        standing = None
        if world > _MANY:
            standing = Representatives.of(program.experiment, None)
            program = reduced(program.experiment, standing)
        self.program, self.pieces = program, program.pieces
        self.experiment, self.plan = program.experiment, program.plan
        own = micro_batches(self.experiment) if standing is None else standing.batches
        self.batches = list(own)
        self.timeline = Timeline(world, standing)
        self.rooms = Rooms(self.whole, self.buckets, self.timeline)
        self.gradients = Gradients(self.experiment, self.pieces, self.timeline, self.rooms)

    def written(self) -> Timeline:
        self.timeline.reside("weights", weight_bytes(self.pieces))
        self.timeline.reside("optimizer", self._of_optimizer())
        self.timeline.reside("in_flight", flying_bytes(self.program))
        self.timeline.reside("codec", residual_bytes(self.program))
        self.timeline.reside("gradients", self.gradients.resident())
        self.timeline.reside("buckets", {"sums of gradients": sums_bytes(self.whole, self.buckets)})
        self.timeline.reside("staging", {"staging": staging_bytes(self.whole)})
        self.gradients.left_by_last_step()
        batches = self.batches
        every = Rows([sum(column) for column in zip(*batches, strict=True)])
        sample = int(np.prod(self.plan.graph.input_shape))
        per_row = sample * self.program.itemsize + _INT64
        self.timeline.make(every.own * per_row, "data", "input")
        self.gradients.begin()
        self._copy_weights()
        results: list[int] = []
        seen = batches[:2]  # those that follow find the same, and are no larger
        for index, rows in enumerate(seen):
            given = self._pass(rows, last=index == len(seen) - 1)
            for tensor in results:
                self.timeline.drop(tensor)
            results = given
        self.rooms.finish()
        self._update()
        return self.timeline

    def _of_optimizer(self) -> Mapping[str, Counts]:
        """Where its state is in parts, these depend on how many ranks the world has."""
        cut = self.experiment.shard_optimizer
        return optimizer_bytes(self.whole if cut else self.program, self.handed)

    def _update(self) -> None:
        """Fused optimizers need nothing besides; late sums begin before they move.

        An averaging needs a bucket's room; handing out weights that others have moved needs the
        bucket, and beside it this rank's part in one piece.
        """
        self.timeline.at("step")
        self.rooms.start()
        sync = self.experiment.sync
        if isinstance(sync, Pipelined) and sync.compensation is not None:
            self._compensate()
        self.rooms.finish()
        if isinstance(sync, LocalSGD):
            room = averaging_bytes(averaged(self.whole.experiment, sync, self.whole.pieces))
            self.timeline.pass_by(room, "buckets", "parameters")
        apart = isinstance(sync, Synchronous) and sync.per_round
        self._hand_out(set(self.pieces.names) - (tail_names(self.plan) if apart else set()))

    def _hand_out(self, names: set[str]) -> None:
        """Weights that others have moved; a fused update hands them out in its buckets."""
        if self.experiment.shard_optimizer and not self.experiment.fused:
            shares = self.whole.experiment.optimizer_shares
            for column in self.handed.columns():
                moved = moved_by(column, self.program.itemsize, shares)
                own = sum(moved.values(), np.zeros_like(column.bytes))
                room = (own + column.bytes) * column.there * within(column, names)
                self.timeline.pass_by(room, "buckets", "parameters")

    def _copy_weights(self) -> None:
        """Those that the gradient of this step is computed at, where that matters later."""
        sync = self.experiment.sync
        if isinstance(sync, Pipelined) and sync.compensation is not None:
            for name in self.pieces.names:
                size, owner = self.pieces.sizes[name], self.pieces.owners[name]
                self.timeline.make(size, "in_flight", owner)

    def _compensate(self) -> None:
        """How far a parameter has moved, and the correction of its gradient, one by one."""
        for name in self.pieces.names:
            room = 3 * self.pieces.sizes[name]
            self.timeline.pass_by(room, "workspace", self.pieces.owners[name])

    def _pass(self, rows: tuple[int, ...], *, last: bool) -> list[int]:
        """Forward and backward of one micro-batch; gives its outputs."""
        if self.plan.rounds == "BK" or self.plan.tail is None:
            running = self._running(rows)
            tape = running.forward(self.program.operations, {}, self.program.operations.results)
            if last:
                self.rooms.last()
            self._learn(running, tape, {})
            return list(tape.results.values())
        return self._in_rounds(rows, self.plan.tail, last=last)

    def _in_rounds(self, rows: tuple[int, ...], tail: Tail, *, last: bool) -> list[int]:
        boundary: Value = (tail.boundary, ())
        head, behind = self.program.operations.parted(tail)
        whole = self._running(rows)
        made = whole.forward(head, {}, (boundary,) if tail.boundary != "input" else ())
        images = self.timeline.make(np.zeros_like(whole.rows.own), "data", "input")
        features = made.results.get(boundary, images)
        needed = self.program.operations.needs_gradient(boundary)
        gathered = None
        if needed:
            size = whole.size(boundary)
            gathered = self.timeline.make(size, "activation_gradients", tail.boundary)
        results: list[int] = []
        every = round_rows(self.plan.rounds, rows, tail.group_size)
        for index, brought in enumerate(every):
            if last and index == len(every) - 1:
                self.rooms.last()
            running = self._running(brought)
            tape = running.forward(behind, {boundary: features}, self.program.operations.results)
            grads: dict[Value, int] = {}
            self._learn(running, tape, grads)
            for tensor in grads.values():
                self.timeline.drop(tensor)
            results += tape.results.values()
            sync = self.experiment.sync
            if isinstance(sync, Synchronous) and sync.per_round:
                self.timeline.at("step")
                self._hand_out(tail_names(self.plan))
                self.gradients.begin(tail_names(self.plan))
        if gathered is not None:
            whole.backward(made, {boundary: self.timeline.hold(gathered)})
            self.timeline.drop(gathered)
        self.timeline.drop(features)
        return results

    def _running(self, rows: tuple[int, ...]) -> Pass:
        return Pass(self.program, self.timeline, self.gradients, Rows(rows))

    def _learn(self, running: Pass, tape: Tape, grads: dict[Value, int]) -> None:
        """The loss of a forward pass, and the backward pass from it."""
        timeline, held = self.timeline, []
        timeline.at("loss")
        for value in self.program.operations.results:
            layout, _, _, _ = self.program.operations.layout_of(value)
            wide = running.size(value, max(_FP32, self.program.itemsize))
            if layout.group_size > 1:
                labels = running.rows.over(layout.group_size) * _INT64
                held.append(timeline.make(labels, "activations", "loss"))
            held.append(timeline.make(wide, "activations", "loss"))
            if isinstance(layout.placement, Shard):
                timeline.pass_by(wide, "workspace", "loss")
        timeline.at("backward", "loss")
        for value in self.program.operations.results:
            wide = running.size(value, max(_FP32, self.program.itemsize))
            if not self.program.operations.needs_gradient(value):
                continue
            timeline.pass_by(wide, "workspace", "loss")
            grads[value] = timeline.make(running.size(value), "activation_gradients", "loss")
        for tensor in held:
            timeline.drop(tensor)
        running.backward(tape, grads)
