"""What every collective of a step brings to each rank: calls, messages, bytes; exact.

The rows are those of the workbench's recorder, which counts what a rank receives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from workbench.plan.experiment import LocalSGD, Synchronous
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.plan.mesh import replica_groups, shard_groups
from workbench.plan.placement import Shard
from workbench.plan.tail import round_rows
from workbench.predict import received
from workbench.predict.batches import micro_batches
from workbench.predict.crossing import crossing_of
from workbench.predict.parameters import averaged, buckets_of, tail_names
from workbench.predict.program import Operation, Program, layout_of
from workbench.predict.received import Groups, Received
from workbench.predict.rows import Counts, Rows, features

Phase = Literal["forward", "backward", "step"]
Purpose = Literal["shard", "replica", "norm", "control"]

_FP32 = 4
_INT64 = 8
_FP64 = 8


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in a step, on all ranks.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_to_all" or "all_reduce".
        layer: for which it is.
        phase: of the step.
        purpose: of its groups.
        groups: the ranks that take part together.
        calls: on each rank of the world.
        messages: non-empty pieces that each rank receives.
        bytes: their size.
        every: steps from one to the next; 1: it is in every step.
    """

    op: str
    layer: str
    phase: Phase
    purpose: Purpose
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[int, ...]
    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    every: int = 1


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step.

    Attributes:
        collectives: in the order of the step.
    """

    collectives: tuple[Collective, ...]

    def received_bytes(self, rank: int) -> float:
        """Of one rank, in a step; what comes every few steps counts its part."""
        return sum(c.bytes[rank] / c.every for c in self.collectives)

    @property
    def most_received_bytes(self) -> float:
        """Of the rank that receives most."""
        return max(self.received_bytes(rank) for rank in range(self.world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.collectives[0].bytes)

    def rows(self, rank: int) -> tuple[tuple[str, str, str, str, int, int, int], ...]:
        """(group, op, layer, phase, calls, messages, bytes) of one rank, as a recorder has them.

        In a step that has all of them: local SGD's averaging is not in every one.
        """
        found: list[tuple[str, str, str, str, int, int, int]] = []
        for one in self.collectives:
            ranks = next(group for group in one.groups if rank in group)
            name = f"{one.purpose}({','.join(map(str, ranks))})"
            counts = (one.calls[rank], one.messages[rank], one.bytes[rank])
            if one.calls[rank]:
                found.append((name, one.op, one.layer, one.phase, *counts))
        return tuple(found)


def traffic_of(program: Program) -> Traffic:
    """The collectives of one step of an experiment."""
    return _Counting(program).found()


_Key = tuple[str, str, Phase, Purpose, tuple[tuple[int, ...], ...], int]


class _Counting:
    def __init__(self, program: Program) -> None:
        self.program, self.pieces = program, program.pieces
        self.experiment, self.plan = program.experiment, program.plan
        self.world = self.plan.world_size
        self.everywhere = np.ones(self.world, dtype=np.int64)
        self._sums: dict[_Key, tuple[Counts, Counts, Counts]] = {}

    def found(self) -> Traffic:
        for rows in micro_batches(self.experiment):
            for operations, part in self._passes(rows):
                self._pass(operations, part)
        if isinstance(self.experiment.sync, LocalSGD):
            self._averaging(self.experiment.sync)
        else:
            self._gradients()
        status = self.everywhere * (2 + self.world)
        world = shard_groups(self.world, self.world)
        got = received.all_reduce(status, world)
        self._add("all_reduce", "status", "step", "control", world, got, _FP64)
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
        for operation in operations:
            if operation.step is not None:
                self._convert(operation, operation.step, rows)
            elif operation.layer is not None and operation.layer.kind == "batch_norm":
                self._normalize(operation)
            elif operation.layer is not None and operation.layer.kind == "attention":
                self._attend(operation.layer)
        given = {operation.gives for operation in operations}
        for value in self.program.results:
            if value in given:
                self._loss(value[0], layout_of(self.program, value)[0], rows)

    def _convert(self, operation: Operation, step: Conversion, rows: Rows) -> None:
        crossing = crossing_of(step, rows)
        groups, width = shard_groups(step.group_size, self.world), operation.itemsize
        if crossing.forward is not None:
            op, got = crossing.forward
            self._add(op, operation.label, "forward", "shard", groups, got, width)
        if crossing.backward is not None and operation.needs_gradient:
            op, got = crossing.backward
            self._add(op, operation.label, "backward", "shard", groups, got, width)

    def _normalize(self, operation: Operation) -> None:
        layer = operation.layer
        if self.plan.batch_norm == "local" or layer is None:
            return
        read = self.plan.flow.inputs[layer.name]
        groups = replica_groups(read.group_size, self.world)
        channels = self.everywhere * features(read, layer.input_shape[:1], self.world)
        width = max(operation.itemsize, _FP32)
        for numel in (channels + 1, channels):
            got = received.all_reduce(numel, groups)
            self._add("all_reduce", layer.name, "forward", "norm", groups, got, width)
            if self.program.needs_gradient(operation.reads[0]):
                self._add("all_reduce", layer.name, "backward", "norm", groups, got, width)

    def _attend(self, layer: Layer) -> None:
        """The one gradient that heads of windowed attention, version 2, have in common."""
        choice = self.plan.layers.get(layer.name)
        hidden = [w.shape[0] for w in layer.weights if w.name.endswith(".cpb_mlp.0.bias")]
        if not hidden or choice is None or choice.scheme != "shard_heads" or choice.group_size == 1:
            return
        groups = shard_groups(choice.group_size, self.world)
        got = received.all_reduce(self.everywhere * (3 * hidden[0]), groups)
        width = self.program.itemsize
        self._add("all_reduce", layer.name, "backward", "shard", groups, got, width)

    def _loss(self, name: str, layout: Layout, rows: Rows) -> None:
        if layout == ROWS:
            return
        groups = shard_groups(layout.group_size, self.world)
        got = received.all_gather(rows.own, groups)
        self._add("all_gather", "labels", "step", "shard", groups, got, _INT64)
        if isinstance(layout.placement, Shard):
            width = max(_FP32, self.program.itemsize)
            every = rows.over(layout.group_size)
            got = received.all_gather(every, groups)
            self._add("all_gather", name, "step", "shard", groups, got, width)
            got = received.all_reduce(2 * every, groups)
            self._add("all_reduce", name, "step", "shard", groups, got, width)

    def _gradients(self) -> None:
        sync, tail, rounds = self.experiment.sync, set[str](), 1
        if isinstance(sync, Synchronous) and sync.per_round and self.plan.tail is not None:
            tail, rounds = tail_names(self.plan), self.plan.tail.group_size
        sizes: dict[int, list[list[tuple[int, int]]]] = {}
        for rank in range(self.world):
            for bucket in buckets_of(self.experiment, self.pieces, rank):
                times = rounds if bucket.names[0] in tail else 1
                own = sizes.setdefault(bucket.group_size, [[] for _ in range(self.world)])
                own[rank].append((bucket.bytes, times))
        for k, buckets in sizes.items():
            self._sum_buckets(k, buckets, "gradients", 1)

    def _averaging(self, sync: LocalSGD) -> None:
        for k in sorted({self.plan.flow.weights[name].group_size for name in self.pieces.names}):
            if k < self.world:
                buckets = [
                    [(size, 1) for size in averaged(self.experiment, sync, self.pieces, k, rank)]
                    for rank in range(self.world)
                ]
                self._sum_buckets(k, buckets, "parameters", sync.every)

    def _sum_buckets(
        self, k: int, buckets: Sequence[Sequence[tuple[int, int]]], layer: str, every: int
    ) -> None:
        """All-reduces of buckets, given as (bytes, times) of each rank."""
        groups, width = replica_groups(k, self.world), self.program.itemsize
        for index in range(max(map(len, buckets))):
            sizes, times = np.zeros_like(self.everywhere), np.zeros_like(self.everywhere)
            for rank, own in enumerate(buckets):
                if index < len(own):
                    sizes[rank], times[rank] = own[index]
            got = received.all_reduce(sizes // width, groups)
            self._add("all_reduce", layer, "step", "replica", groups, got, width, times, every)

    def _add(
        self,
        op: str,
        layer: str,
        phase: Phase,
        purpose: Purpose,
        groups: Groups,
        got: Received,
        width: int,
        times: Counts | None = None,
        every: int = 1,
    ) -> None:
        calls = self.everywhere if times is None else times
        key = (op, layer, phase, purpose, tuple(map(tuple, groups)), every)
        sums = self._sums.setdefault(key, self._nothing())
        for total, more in zip(
            sums, (calls, got.messages * calls, got.elements * width * calls), strict=True
        ):
            total += more

    def _nothing(self) -> tuple[Counts, Counts, Counts]:
        none = np.zeros_like(self.everywhere)
        return none, none.copy(), none.copy()


def _listed(counts: Counts) -> tuple[int, ...]:
    return tuple(counts.tolist())
