"""Counts the collectives of a step: of its passes, of gradients and weights, and of its status."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from workbench.plan.experiment import LocalSGD, ParameterServer, Pipelined, Synchronous
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.plan.mesh import replica_groups, shard_groups
from workbench.plan.placement import Shard
from workbench.plan.tail import round_rows
from workbench.predict import received
from workbench.predict.crossing import crossing_of
from workbench.predict.givers import add_served
from workbench.predict.received import Received
from workbench.predict.summing import Summing
from workbench.predict.traffic import Collective, Phase, Purpose, Traffic
from workbench.predict.windows import trained_hidden
from workbench.program.batches import micro_batches
from workbench.program.buckets import averaged, handed_out
from workbench.program.hosts import Groups
from workbench.program.operations import Operation, Program, layout_of
from workbench.program.parameters import tail_names
from workbench.program.rows import Counts, Rows, features
from workbench.program.sharding import moved_by

_FP32 = 4
_INT64 = 8
_FP64 = 8


def traffic_of(program: Program) -> Traffic:
    """The collectives of one step of an experiment."""
    return Counting(program).found()


Key = tuple[str, str, Phase, Purpose, tuple[tuple[int, ...], ...], int]


class Counting:
    """Goes through a step, and adds up what every collective brings.

    Args:
        program: of the step.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.pieces = program, program.pieces
        self.experiment, self.plan = program.experiment, program.plan
        self.world = self.plan.world_size
        self.everywhere = np.ones(self.world, dtype=np.int64)
        self.summing = Summing(program.hosts)
        self._sums: dict[Key, tuple[Counts, Counts, Counts]] = {}

    def found(self) -> Traffic:
        """The collectives, in the order in which they first occur."""
        for rows in micro_batches(self.experiment):
            for operations, part in self._passes(rows):
                self._pass(operations, part)
        match self.experiment.sync:
            case LocalSGD() as sync:
                self._averaging(sync)
            case ParameterServer() as sync:
                self._served(sync)
            case sync:
                self._gradients(sync)
        status = self.everywhere * (3 + self.world)
        world = shard_groups(self.world, self.world)
        got = self.summing.waited_for(status, world, _FP64)
        self._add("all_reduce", "status", "step", "control", world, got)
        found = []
        for (op, layer, phase, purpose, groups, every), sums in self._sums.items():
            calls, messages, sizes = map(_listed, sums)
            found.append(
                Collective(op, layer, phase, purpose, groups, calls, messages, sizes, every)
            )
        return Traffic(tuple(found))

    def _passes(self, rows: tuple[int, ...]) -> Iterator[tuple[list[Operation], Rows]]:
        """The operations of a micro-batch, with the rows that they see."""
        tail = self.plan.tail if self.plan.rounds != "BK" else None
        if tail is None:
            yield list(self.program.operations), Rows(rows)
            return
        head, behind = self.program.parted(tail)
        yield head, Rows(rows)
        for brought in round_rows(self.plan.rounds, rows, tail.group_size):
            yield behind, Rows(brought)

    def _pass(self, operations: list[Operation], rows: Rows) -> None:
        again = {o.segment for o in operations if o.segment is not None and o.needs_gradient}
        for operation in operations:
            times = self.everywhere * (2 if operation.segment in again else 1)
            if operation.step is not None:
                self._convert(operation, operation.step, rows, times)
            elif operation.layer is not None and self.plan.synchronizes(operation.layer):
                self._normalize(operation, operation.layer, times)
            elif operation.layer is not None and operation.needs_gradient:
                self._attend(operation.layer)
        given = {operation.gives for operation in operations}
        for value in self.program.results:
            if value in given:
                self._loss(value[0], layout_of(self.program, value)[0], rows)

    def _convert(self, operation: Operation, step: Conversion, rows: Rows, times: Counts) -> None:
        crossing = crossing_of(step, rows, operation.itemsize, self.summing)
        groups = shard_groups(step.group_size, self.world)
        if crossing.forward is not None:
            op, got = crossing.forward
            self._add(op, operation.label, "forward", "shard", groups, got, times)
        if crossing.backward is not None and operation.needs_gradient:
            op, got = crossing.backward
            self._add(op, operation.label, "backward", "shard", groups, got)

    def _normalize(self, operation: Operation, layer: Layer, times: Counts) -> None:
        read = self.plan.flow.inputs[layer.name]
        groups = replica_groups(read.group_size, self.world)
        channels = self.everywhere * features(read, layer.input_shape[:1], self.world)
        width = max(operation.itemsize, _FP32)
        for numel in (channels + 1, channels):
            got = self.summing.waited_for(numel, groups, width)
            self._add("all_reduce", layer.name, "forward", "norm", groups, got, times)
            if operation.wanted:
                self._add("all_reduce", layer.name, "backward", "norm", groups, got)

    def _attend(self, layer: Layer) -> None:
        """The one gradient that heads of windowed attention, version 2, have in common."""
        choice = self.plan.layers.get(layer.name)
        hidden = trained_hidden(layer)
        if not hidden or choice is None or choice.scheme != "shard_heads" or choice.group_size == 1:
            return
        groups = shard_groups(choice.group_size, self.world)
        numel = self.everywhere * (3 * hidden)
        got = self.summing.waited_for(numel, groups, self.program.itemsize)
        self._add("all_reduce", layer.name, "backward", "shard", groups, got)

    def _loss(self, name: str, layout: Layout, rows: Rows) -> None:
        if layout == ROWS:
            return
        groups = shard_groups(layout.group_size, self.world)
        got = received.all_gather(rows.own * _INT64, groups)
        self._add("all_gather", "labels", "step", "shard", groups, got)
        if isinstance(layout.placement, Shard):
            width = max(_FP32, self.program.itemsize)
            every = rows.over(layout.group_size)
            got = received.all_gather(every * width, groups)
            self._add("all_gather", name, "step", "shard", groups, got)
            got = self.summing.waited_for(2 * every, groups, width)
            self._add("all_reduce", name, "step", "shard", groups, got)

    def _gradients(self, sync: Synchronous | Pipelined) -> None:
        """Their sums, and the weights that whoever has moved them hands out."""
        tail, rounds, updates = set[str](), 1, 1
        if isinstance(sync, Synchronous) and sync.per_round and self.plan.tail is not None:
            tail, rounds = tail_names(self.plan), self.plan.tail.group_size
            updates = self._rounds_with_rows()
        width = self.program.itemsize
        for column in self.program.buckets.columns() if not self.experiment.fused else ():
            groups = replica_groups(column.group_size, self.world)
            codec = sync.codec if len(groups[0]) > 1 else None
            got = self.summing.started(
                column.bytes // width, groups, width, sync.algorithm, buffer=True, codec=codec
            )
            times = column.there + column.within(tail) * (rounds - 1)
            self._add("all_reduce", "gradients", "step", "replica", groups, got, times)
        if self.experiment.shard_optimizer:
            for column in handed_out(self.experiment, self.pieces).columns():
                groups = replica_groups(column.group_size, self.world)
                shares = self.experiment.optimizer_shares
                moved = sum(moved_by(column, width, shares).values(), self.everywhere * 0)
                times = column.there + column.within(tail) * (updates - 1)
                if self.experiment.fused:
                    got = received.reduce_scatter(moved, groups)
                    self._add("reduce_scatter", "gradients", "step", "replica", groups, got, times)
                got = received.all_gather(moved, groups)
                self._add("all_gather", "parameters", "step", "replica", groups, got, times)

    def _served(self, sync: ParameterServer) -> None:
        """All gradients to the server of each piece, and all weights back."""
        for column in self.program.buckets.columns():
            k = column.group_size
            groups, ranks = replica_groups(k, self.world), np.arange(self.world)
            serves = (ranks // k == sync.server // k) & (column.there > 0)
            others = (self.world // k - 1) * serves
            asks = column.there * ~serves
            to_server = partial(add_served, serves, column.bytes, groups)
            up = Received(others, others * column.bytes, (partial(to_server, up=True),))
            down = Received(asks, asks * column.bytes, (partial(to_server, up=False),))
            self._add("reduce", "gradients", "step", "replica", groups, up, column.there)
            self._add("broadcast", "parameters", "step", "replica", groups, down, column.there)

    def _rounds_with_rows(self) -> int:
        """Those after which weights behind the gather move."""
        (rows,) = micro_batches(self.experiment)
        assert self.plan.tail is not None
        every = round_rows(self.plan.rounds, rows, self.plan.tail.group_size)
        return sum(sum(brought) > 0 for brought in every)

    def _averaging(self, sync: LocalSGD) -> None:
        width = self.program.itemsize
        for column in averaged(self.experiment, sync, self.pieces).columns():
            groups = replica_groups(column.group_size, self.world)
            got = self.summing.started(column.bytes // width, groups, width, "auto", buffer=False)
            self._add(
                "all_reduce", "parameters", "step", "replica", groups, got, column.there, sync.every
            )

    def _add(
        self,
        op: str,
        layer: str,
        phase: Phase,
        purpose: Purpose,
        groups: Groups,
        got: Received,
        times: Counts | None = None,
        every: int = 1,
    ) -> None:
        calls = self.everywhere if times is None else times
        key = (op, layer, phase, purpose, tuple(map(tuple, groups)), every)
        sums = self._sums.setdefault(key, self._nothing())
        for total, more in zip(sums, (calls, got.messages * calls, got.bytes * calls), strict=True):
            total += more
        self.count(key, got, calls)

    def count(self, key: Key, got: Received, calls: Counts) -> None:
        """Takes note of a collective, called so often by each rank: for those who want to know."""

    def _nothing(self) -> tuple[Counts, Counts, Counts]:
        none = np.zeros_like(self.everywhere)
        return none, none.copy(), none.copy()


def _listed(counts: Counts) -> tuple[int, ...]:
    return tuple(counts.tolist())
