"""What ranks do with gradients: sum them, agree, update, hand out, average."""

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment import ParameterServer
from workbench.predict.time.duration import Seconds, update_seconds
from workbench.predict.time.events import Call, Script
from workbench.predict.time.replicas import Replicas, some
from workbench.program.collectives import takes_part
from workbench.program.instructions import Average, HandOut, Reduce, Update, Updater, Wait
from workbench.program.parameters import copies
from workbench.program.rows import Counts
from workbench.program.step import Program

_FP64 = 8
_COPIED = 4  # an average is read and written once into its bucket, and once back
_HANDED_OUT = 4


class Updates:
    """Writes what concerns gradients and parameters.

    Args:
        program: whose.
        replicas: groups of the kept ranks.
        script: to write on.
    """

    def __init__(self, program: Program, replicas: Replicas, script: Script) -> None:
        self.program, self.replicas, self.script = program, replicas, script
        self.experiment, self.speeds = program.experiment, replicas.speeds
        self.ones = np.ones(program.plan.world_size, dtype=np.int64)
        self._begun: set[int] = set()

    def reduce(self, index: int) -> None:
        """Starts the sum of a bucket, unless it is under way, or nobody else has the parameters.

        Args:
            index: of the instruction, under which it is waited for.
        """
        reduce = self.program.instructions[index]
        assert isinstance(reduce, Reduce)
        if self.replicas.count(reduce.column.group_size) > 1 and index not in self._begun:
            self._begun.add(index)
            sizes = np.where(takes_part(reduce) > 0, reduce.column.bytes, 0)
            self.script.start(self._sum(reduce, sizes), index)

    def wait(self, wait: Wait) -> None:
        """For sums of this step, or of one before.

        Those of this step which a later one waits for are taken to begin here, with their
        gradients: what goes ahead of them, the agreement, is too little to hold them up.
        """
        for index in wait.reduces if wait.late else ():
            self.reduce(index)
        for index in wait.reduces:
            if index in self._begun:
                self.script.join(index, "gradients", wait.late)

    def agree(self) -> None:
        """The small sum that every step ends with, before anybody updates."""
        world = self.replicas.ranks.world_size
        if world > 1:
            sizes = self.ones * (3 + world) * _FP64
            self.script.meet(self.replicas.all_reduce(sizes, _FP64, 1, "status"))

    def update(self, update: Update) -> None:
        """Moves parameters."""
        pieces, label = self.program.pieces, self.experiment.optimizer.kind
        known: dict[tuple[int, int], Seconds] = {}  # of the same pieces, as equal layers have them
        total = np.zeros(len(self.ones))
        for name in update.parameters:
            size = pieces.sizes[name]
            k = self.program.plan.flow.weights[name].group_size
            if (id(size), k) not in known:
                known[id(size), k] = self._own(size, k, update.by)
            total = total + known[id(size), k]
        seconds = update_seconds(label, total, copies(self.experiment.optimizer), self.speeds)
        self.script.work("update", label, seconds)

    def hand_out(self, hand_out: HandOut) -> None:
        """Makes the parameters whole again, bucket by bucket; with a fused update, in buckets.

        From a server, all buckets are under way at once.
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
        """Local SGD's averaging of parameters."""
        for column in average.buckets.columns():
            sizes, k = column.bytes, column.group_size
            self.script.work("update", "averaging", self.speeds.streaming(_COPIED * sizes))
            call = self.replicas.all_reduce(
                sizes, self.program.itemsize, k, "parameters", beside=True, takes=some(sizes)
            )
            self.script.meet(call)

    def rest(self) -> None:
        """What every step costs besides."""
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
        """Bytes that each rank moves of a parameter that lies over groups of k ranks."""
        if by == "server" and self.replicas.count(k) > 1:
            return np.where(self._serves(k), size, 0.0)
        if by == "owners" and self.replicas.count(k) > 1:
            return size * self.replicas.part(k, self.experiment.optimizer_shares)
        return size.astype(np.float64)

    def _send_back(self, hand_out: HandOut) -> None:
        totals: dict[int, Counts] = {}
        for column in hand_out.buckets.columns():
            k = column.group_size
            totals[k] = totals.get(k, 0 * column.bytes) + column.bytes
        for k, held in totals.items():
            self.script.meet(self.replicas.from_server(held, k, self._serves(k)))

    def _serves(self, group_size: int) -> NDArray[np.bool_]:
        """Which ranks update what they hold in common with others."""
        sync = self.experiment.sync
        assert isinstance(sync, ParameterServer)
        return self.replicas.serves(sync.server, group_size)
