"""The events of one step in time, instruction by instruction of its program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.graph.graph import sample_bytes
from workbench.predict.time.duration import Seconds, Speeds, load_seconds, update_seconds
from workbench.predict.time.events import Call, Event, Script
from workbench.predict.time.pass_events import LayerTimes, PassEvents
from workbench.predict.time.replicas import Replicas, some
from workbench.program.collectives import takes_part
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
from workbench.program.rows import Counts, Rows
from workbench.program.step import Program


@dataclass(frozen=True)
class Written:
    """The events of a step, and how certain their times are.

    Attributes:
        events: the events of the step, in order.
        error: relative half width of the error band around the layers' seconds.
        estimated: the names of layers whose shapes the machine has not measured.
        algorithms: the algorithms of the all-reduces, by the name of what they reduce.
    """

    events: tuple[Event, ...]
    error: float
    estimated: tuple[str, ...]
    algorithms: Mapping[str, tuple[str, ...]]


def written(program: Program, speeds: Speeds, *, due: bool = True) -> Written:
    """Writes the events of a step on the simulated ranks.

    Args:
        program: the program of these ranks.
        speeds: the devices and links of these ranks.
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
    """Writes the events that concern gradients and parameters.

    Args:
        program: the program whose gradients and parameters these are.
        replicas: the replica groups of the simulated ranks.
        script: the script that events are written to.
    """

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
