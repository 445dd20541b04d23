"""From the operations of a pass to the instructions of a step: rounds, micro-batches, strategies.

    load, zero_grad
    for each micro-batch
        whole        forward, loss, backward
        in rounds    forward of the head; for each round forward, loss and backward of the tail,
                     while the next round's rows are gathered; backward of the head
    the strategy's end

Backward passes take the operations in reverse; a segment that is recomputed runs forward once
more just before its last operation. In the step's last backward pass, or every round's where each
round is a step of its own, a bucket begins to be summed when the last of its gradients is there:
strictly in the buckets' order, one that is filled early behind those before it. Where ranks of a
replica group fill theirs in different places, which unequal pieces beside replicated layers can
bring about, a sum begins with the last of them. What a step ends with follows from the strategy's
timing, whoever's it is:

    gradients            wait, agree, update, and hand_out where not all holders update
    gradients, late      wait for an earlier step's sums, agree, reduce, update
    weights              rescale, agree, update, average

Gradients of a scaled loss are unscaled first, go through the strategy's own rule, if it has one
(adjust), and are clipped, before the update; weights that were averaged, through another one
(correct). Late ones are clipped before the next reduction, behind whose bytes the few of the norm
would queue on the wire.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from workbench.plan.experiment.experiment import (
    Experiment,
    ParameterServer,
    Synchronous,
)
from workbench.plan.placement.rounds import Tail, round_rows
from workbench.program.buckets import Bucket, Buckets, Pieces, averaged, late, tail_names
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
    Rescale,
    Section,
    Unscale,
    Update,
    Updater,
    Wait,
    Weigh,
    ZeroGrad,
)
from workbench.program.operations import Operation, Operations, Value
from workbench.program.rows import Rows

_Kind = Literal["prefetch", "forward", "loss", "backward", "step"]
_Key = tuple[int, int]
"""(group size, which of the buckets over groups of this size)."""


class Reductions:
    """Follows gradients as they come, and gives the reductions that can begin."""

    def __init__(self, experiment: Experiment, buckets: Buckets) -> None:
        self._experiment, self._buckets, timing = experiment, buckets, experiment.sync.timing
        self._every = timing.every if timing.adds_up else 1
        self._columns = {(c.group_size, c.number): c for c in buckets.columns()}
        self._keys = [_keys(own) for own in buckets.of_place]
        self._places: dict[int, Mapping[int, set[int]]] = {}
        self.begin()

    def begin(self) -> None:
        self._waiting = [[set(bucket.names) for bucket in own] for own in self._buckets.of_place]
        self._home = [{name: one for one in own for name in one} for own in self._waiting]
        self._next = [0] * len(self._waiting)
        self._come: dict[_Key, dict[int, int]] = {}  # the places, and behind which instruction
        self._begun: set[tuple[_Key, int]] = set()

    def settle(self, names: Iterable[str], index: int) -> Iterator[Reduce]:
        """The sums that begin since these gradients are there."""
        filled = False
        for name in names:
            for home in self._home:
                waiting = home.get(name)
                if waiting is not None:
                    waiting.discard(name)
                    filled = filled or not waiting
        return self._ready(index) if filled else iter(())

    def finish(self) -> Iterator[Reduce]:
        """The sums that have not begun yet: backward has reached all that it reaches."""
        for own in self._waiting:
            for waiting in own:
                waiting.clear()
        return self._ready(-1)

    def _ready(self, index: int) -> Iterator[Reduce]:
        """Those that have become ready, in the order of the buckets."""
        ready: dict[_Key, None] = {}
        for place, keys in enumerate(self._keys):
            while self._next[place] < len(keys) and not self._waiting[place][self._next[place]]:
                key = keys[self._next[place]]
                self._come.setdefault(key, {})[place] = index
                ready.setdefault(key)
                self._next[place] += 1
        for key in ready:
            members = self._members(key)
            if members:
                yield self._reduce(key, members)

    def _members(self, key: _Key) -> tuple[int, ...]:
        """Of each shard group, those whose whole replica group has come to this bucket."""
        come, found = self._come[key].keys(), []
        k = key[0]
        if k not in self._places:
            self._places[k] = _places_of_members(self._buckets, k)
        for member, places in self._places[k].items():
            if (key, member) not in self._begun and places <= come:
                self._begun.add((key, member))
                found.append(member)
        return tuple(found)

    def _reduce(self, key: _Key, members: tuple[int, ...]) -> Reduce:
        sync, to = self._experiment.sync, updater_of(self._experiment)
        algorithm, codec = sync.summing
        column, come = self._columns[key], self._come[key]
        after = tuple(come.get(place, -1) for place in range(len(column.of_place)))
        if to == "owners" and not self._experiment.fused:
            to = "holders"
        return Reduce(column, members, to, algorithm, codec, after, self._every)


def updater_of(experiment: Experiment) -> Updater:
    """Who moves a parameter, of the ranks that hold the same piece of it."""
    if isinstance(experiment.sync, ParameterServer):
        return "server"
    return "owners" if experiment.shard_optimizer else "holders"


def _places_of_members(buckets: Buckets, group_size: int) -> Mapping[int, set[int]]:
    """For each member of a shard group that has some bucket, the places of its replicas."""
    places = len(buckets.of_place)
    member = np.arange(len(buckets.place)) % group_size
    found: dict[int, set[int]] = {}
    for pair in np.unique(member * places + buckets.place).tolist():
        found.setdefault(pair // places, set()).add(pair % places)
    return found


def _keys(own: Sequence[Bucket]) -> list[_Key]:
    seen: Counter[int] = Counter()
    keys = []
    for bucket in own:
        keys.append((bucket.group_size, seen[bucket.group_size]))
        seen[bucket.group_size] += 1
    return keys


def unrolled(
    experiment: Experiment,
    operations: Operations,
    buckets: Buckets,
    handed: Buckets,
    batches: Sequence[tuple[int, ...]],
) -> tuple[Section, ...]:
    """One step in the middle of a run, section by section."""
    return _Unrolling(experiment, operations, buckets, handed).written(batches)


class _Unrolling:
    def __init__(
        self, experiment: Experiment, operations: Operations, buckets: Buckets, handed: Buckets
    ) -> None:
        self.experiment, self.operations, self.handed = experiment, operations, handed
        self.plan, self.sync = experiment.plan, experiment.sync
        self.timing = self.sync.timing
        self.tail: Tail | None = self.plan.tail if self.plan.rounds != "BK" else None
        self.late, self.every = late(experiment), self.timing.every
        of_rounds: set[str] = set()
        if isinstance(self.sync, Synchronous) and self.sync.per_round:
            of_rounds = tail_names(self.plan)
        self.names = self.plan.graph.trainable
        self.of_step = tuple(name for name in self.names if name not in of_rounds)
        self.of_rounds = tuple(name for name in self.names if name in of_rounds)
        self.step_sums = Reductions(experiment, buckets.within(set(self.of_step)))
        self.round_sums = Reductions(experiment, buckets.within(of_rounds))
        self._sections: list[tuple[_Kind, Pass | None, list[Instruction]]] = []
        self._count = 0  # of instructions so far
        self._passes: dict[tuple[int, ...], Rows] = {}
        self._step_reduces: list[int] = []
        self._round_reduces: list[int] = []

    def written(self, batches: Sequence[tuple[int, ...]]) -> tuple[Section, ...]:
        self._begin("step")
        totals = [sum(column) for column in zip(*batches, strict=True)]
        each = tuple(self._rows(rows) for rows in batches)
        self._add(Load(Rows(totals), each))
        if self.experiment.loss is not None and self.experiment.loss.weighs:
            self._add(Weigh())
        self._add(ZeroGrad(self.names, self._turn))
        if self.timing.keeps_weights:
            self._add(KeepWeights(self.names))
        results = self.operations.results
        for index, rows in enumerate(batches):
            last = index == len(batches) - 1
            if self.tail is None:
                self._whole(Pass(index, None, self._rows(rows), (), results), last=last)
            else:
                self._in_rounds(index, rows, self.tail, last=last)
        self._begin("step")
        if self.late:
            self._end_late()
        else:
            self._end()
        sections, first = list[Section](), 0
        for kind, on, instructions in self._sections:
            if instructions:
                sections.append(Section(kind, on, first, tuple(instructions)))
            first += len(instructions)
        return tuple(sections)

    def _end(self) -> None:
        of_weights = self.timing.of_weights
        if of_weights:
            self._add(Rescale(self.names, None))
        else:
            self._wait(self.step_sums, self._step_reduces)
        self._add(Agree(), *self._unscale(), *self._adjust(), *self._clip())
        self._update(self.of_step)
        if of_weights:
            buckets = averaged(self.experiment, Pieces.of(self.experiment))
            self._add(Average(buckets, self.every))
            if self.timing.corrects:
                self._add(Correct(self.names, self.every))

    def _end_late(self) -> None:
        """Of sums that are used late; they begin behind the agreement, whose bytes go first."""
        reduces = list(self.step_sums.finish())
        made: list[Instruction] = [*self._adjust(), *self._clip()]
        ahead = made if self._clip() else []
        first = self._count + 2 + len(ahead)
        waited = tuple(range(first, first + len(reduces)))
        self._add(Wait(waited, self.late), Agree(), *ahead, *reduces)
        if not ahead:
            self._add(*made)
        self._update(self.of_step)

    def _whole(self, on: Pass, *, last: bool) -> None:
        operations = list(self.operations)
        self._forward(operations, on)
        self._loss(on)
        self._backward(operations, on, last=last, adds=on.micro_batch > 0)

    def _loss(self, on: Pass) -> None:
        self._begin("loss", on)
        self._add(Loss(self.operations.results, on))

    def _in_rounds(self, index: int, rows: tuple[int, ...], tail: Tail, *, last: bool) -> None:
        """The head once, the tail in rounds; the next round's rows are gathered beside one."""
        boundary: Value = (tail.boundary, ())
        head, behind = self.operations.parted(tail)
        gathers = [
            operation
            for operation in behind
            if operation.step is not None
            and operation.reads == (boundary,)
            and operation.step.name == "all_gather_rows"
        ]
        left = () if tail.boundary in self.plan.graph.sources else (boundary,)
        whole = Pass(index, None, self._rows(rows), (), left, from_loss=False)
        self._forward(head, whole)
        every = [
            Pass(index, number, self._rows(brought), (boundary,), self.operations.results)
            for number, brought in enumerate(round_rows(self.plan.rounds, rows, tail.group_size))
        ]
        ahead = self._prefetch(gathers, every[0])
        for on in every:
            number = on.round or 0
            begun = ahead
            if number + 1 < len(every):
                ahead = self._prefetch(gathers, every[number + 1])
            self._forward(behind, on, begun)
            self._loss(on)
            adds = (index > 0 or number > 0) and not self.of_rounds
            self._backward(behind, on, last=last and number == len(every) - 1, adds=adds)
            if self.of_rounds:
                self._end_of_round(on)
        if self.operations.needs_gradient(boundary):
            self._backward(head, whole, last=last, adds=index > 0)

    def _end_of_round(self, on: Pass) -> None:
        """A step of the weights behind the gather; the mean over no rows moves nothing."""
        self._begin("step")
        self._wait(self.round_sums, self._round_reduces)
        if on.rows.own.any():
            self._add(Rescale(self.of_rounds, on))
            self._update(self.of_rounds)
        self._add(ZeroGrad(self.of_rounds))
        self.round_sums.begin()
        self._round_reduces = []

    def _forward(
        self, operations: Iterable[Operation], on: Pass, begun: dict[Value, int] | None = None
    ) -> None:
        """A forward pass.

        Args:
            begun: the index of the prefetch of each value that has one.
        """
        self._begin("forward", on)
        for operation in operations:
            if operation.step is not None:
                prefetch = None if begun is None else begun.get(operation.gives)
                self._add(Convert(operation, on, prefetch=prefetch))
            elif operation.computes:
                self._add(Forward(operation, on))

    def _prefetch(self, gathers: Iterable[Operation], on: Pass) -> dict[Value, int]:
        begun = {}
        self._begin("prefetch", on)
        for operation in gathers:
            begun[operation.gives] = self._count
            self._add(Prefetch(operation, on))
        return begun

    def _backward(
        self, operations: Sequence[Operation], on: Pass, *, last: bool, adds: bool
    ) -> None:
        """A backward pass.

        Args:
            last: whether no parameter gets another gradient afterwards, but for the head's.
            adds: whether parameters have gradients already.
        """
        readers: Counter[Value] = Counter()
        for operation in operations:
            if operation.needs_gradient:
                readers.update(operation.reads)
        again: set[int] = set()
        self._begin("backward", on)
        for operation in reversed(operations):
            if not operation.needs_gradient or operation.itemsize == 0:
                continue
            segment = operation.segment
            if segment is not None and segment not in again:
                again.add(segment)
                inside = tuple(one for one in operations if one.segment == segment)
                self._add(Recompute(segment, inside, on))
            gradients = readers.get(operation.gives, 1)
            if operation.layer is None:
                self._add(Convert(operation, on, "backward", gradients=gradients))
                continue
            names = [weight.name for weight in operation.layer.weights]
            adds_up = (adds or self.timing.adds_up) and bool(names)
            self._add(Backward(operation, on, adds_up, gradients))
            if names and not self.late:
                self._settle(names, last=last)

    def _settle(self, names: Sequence[str], *, last: bool) -> None:
        index = self._count - 1
        if last:
            self._reduce(self.step_sums.settle(names, index), self._step_reduces)
        if self.of_rounds:
            self._reduce(self.round_sums.settle(names, index), self._round_reduces)

    def _reduce(self, reduces: Iterable[Reduce], begun: list[int]) -> None:
        for one in reduces:
            begun.append(self._count)
            self._add(one)

    def _wait(self, sums: Reductions, begun: list[int]) -> None:
        """Begins what backward has not reached, and waits for all."""
        self._reduce(sums.finish(), begun)
        if begun:
            self._add(Wait(tuple(begun), every=self._turn))

    def _clip(self) -> tuple[Clip, ...]:
        norm, value = self.experiment.clip_norm, self.experiment.clip_value
        if norm is None and value is None:
            return ()
        return (Clip(self.names, norm, value, updater_of(self.experiment), self._turn),)

    def _unscale(self) -> tuple[Unscale, ...]:
        if self.experiment.scaling is None:
            return ()
        return (Unscale(self.names, updater_of(self.experiment)),)

    def _adjust(self) -> tuple[Adjust, ...]:
        return (Adjust(self.names, self._turn),) if self.timing.adjusts else ()

    @property
    def _turn(self) -> int:
        return self.every if self.timing.adds_up else 1

    def _update(self, names: tuple[str, ...]) -> None:
        by = updater_of(self.experiment)
        self._add(Update(names, by, self._turn))
        if by == "server":
            self._add(HandOut(self.handed, by, False))
        elif by == "owners":
            handed = self.handed.within(set(names))
            self._add(HandOut(handed, by, self.experiment.fused, self._turn))

    def _rows(self, rows: tuple[int, ...]) -> Rows:
        if rows not in self._passes:
            self._passes[rows] = Rows(rows)
        return self._passes[rows]

    def _begin(self, kind: _Kind, on: Pass | None = None) -> None:
        """What is added from here on is of this kind and pass."""
        self._sections.append((kind, on, []))

    def _add(self, *instructions: Instruction) -> None:
        self._sections[-1][2].extend(instructions)
        self._count += len(instructions)
