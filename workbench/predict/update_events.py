"""What ranks do with gradients that are summed: agree, update, hand out, average."""

import numpy as np

from workbench.plan.experiment import LocalSGD, ParameterServer
from workbench.predict.duration import Seconds, update_seconds
from workbench.predict.events import Script
from workbench.predict.replicas import Replicas, some
from workbench.program.buckets import averaged, handed_out, within
from workbench.program.parameters import copies
from workbench.program.rows import Counts
from workbench.program.step import Program

_FP64 = 8
_COPIED = 4  # an average is read and written once into its bucket, and once back
_HANDED_OUT = 4


class Updates:
    """Writes the ends of steps.

    Args:
        program: whose.
        replicas: groups of the kept ranks.
        script: to write on.
    """

    def __init__(self, program: Program, replicas: Replicas, script: Script) -> None:
        self.program, self.replicas, self.script = program, replicas, script
        self.experiment, self.speeds = program.experiment, replicas.speeds
        self.ones = np.ones(program.plan.world_size, dtype=np.int64)

    def agree(self) -> None:
        """The small sum that every step ends with, before anybody updates."""
        world = self.replicas.ranks.world_size
        if world > 1:
            sizes = self.ones * (3 + world) * _FP64
            self.script.meet(self.replicas.all_reduce(sizes, _FP64, 1, "status"))

    def update(self, names: set[str] | None = None) -> None:
        """Moves parameters: all, or these."""
        pieces, label = self.program.pieces, self.experiment.optimizer.kind
        chosen = [name for name in pieces.names if names is None or name in names]
        known: dict[tuple[int, int], Seconds] = {}  # of the same pieces, as equal layers have them
        total = np.zeros(len(self.ones))
        for name in chosen:
            size = pieces.sizes[name]
            k = self.program.plan.flow.weights[name].group_size
            if (id(size), k) not in known:
                known[id(size), k] = self._own(size, k)
            total = total + known[id(size), k]
        seconds = update_seconds(label, total, copies(self.experiment.optimizer), self.speeds)
        self.script.work("update", label, seconds)
        if isinstance(self.experiment.sync, ParameterServer):
            self._send_back(self.experiment.sync.server)
        elif self.experiment.shard_optimizer:
            self._hand_out(names)

    def average(self, sync: LocalSGD) -> None:
        """Local SGD's averaging of parameters."""
        for column in averaged(self.experiment, sync, self.program.pieces).columns():
            sizes, k = column.bytes, column.group_size
            self.script.work("update", "averaging", self.speeds.streaming(_COPIED * sizes))
            call = self.replicas.all_reduce(
                sizes, self.program.itemsize, k, "parameters", beside=True, takes=some(sizes)
            )
            self.script.meet(call)

    def rest(self) -> None:
        """What every step costs besides."""
        self.script.work("step", "step", self.speeds.each("step_s"))

    def _own(self, size: Counts, k: int) -> Seconds:
        """Bytes that each rank moves of a parameter that lies over groups of k ranks."""
        sync = self.experiment.sync
        if isinstance(sync, ParameterServer) and self.replicas.count(k) > 1:
            return np.where(self.replicas.serves(sync.server, k), size, 0.0)
        if self.experiment.shard_optimizer and self.replicas.count(k) > 1:
            return size * self.replicas.part(k, self.experiment.optimizer_shares)
        return size.astype(np.float64)

    def _hand_out(self, names: set[str] | None) -> None:
        """Makes the parameters whole again, bucket by bucket; with a fused update, in buckets."""
        fused, shares = self.experiment.fused, self.experiment.optimizer_shares
        passes = _HANDED_OUT // 2 if fused else _HANDED_OUT
        for column in handed_out(self.experiment, self.program.pieces).columns():
            held = (
                column.bytes
                if names is None
                else column.bytes * column.there * within(column, names)
            )
            if not held.any():
                continue
            self.script.work("update", "hand-out", self.speeds.streaming(passes * held))
            call = self.replicas.from_owners(held, column.group_size, shares, fused=fused)
            self.script.meet(call)

    def _send_back(self, server: int) -> None:
        """The weights that servers have moved; all buckets are under way at once."""
        totals: dict[int, Counts] = {}
        for column in self.program.buckets.columns():
            k = column.group_size
            totals[k] = totals.get(k, 0 * column.bytes) + column.bytes
        for k, held in totals.items():
            self.script.meet(self.replicas.from_server(held, k, self.replicas.serves(server, k)))
