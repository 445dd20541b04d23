"""What ranks do with gradients that are summed: agree, update, hand out, average."""

import numpy as np

from workbench.plan.experiment import LocalSGD
from workbench.predict.duration import Seconds, update_seconds
from workbench.predict.events import Script
from workbench.predict.parameters import averaged, copies
from workbench.predict.program import Program
from workbench.predict.replicas import Replicas
from workbench.predict.rows import Counts
from workbench.predict.sums import Buckets

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
            sizes = self.ones * (2 + world) * _FP64
            self.script.meet(self.replicas.all_reduce(sizes, _FP64, 1, "status"))

    def update(self, names: set[str] | None = None) -> None:
        """Moves parameters: all, or these."""
        pieces, label = self.program.pieces, self.experiment.optimizer.kind
        chosen = [name for name in pieces.names if names is None or name in names]
        total = sum((self._own(name) for name in chosen), np.zeros(len(self.ones)))
        seconds = update_seconds(label, total, copies(self.experiment.optimizer), self.speeds)
        self.script.work("update", label, seconds)
        if self.experiment.shard_optimizer:
            self._hand_out(names)

    def average(self, sync: LocalSGD) -> None:
        """Local SGD's averaging of parameters."""
        plan, pieces = self.program.plan, self.program.pieces
        placed = plan.flow.weights
        for k in sorted({placed[name].group_size for name in pieces.names}):
            if self.replicas.count(k) == 1:
                continue
            columns = range(plan.world_size)
            lists = [averaged(self.experiment, sync, pieces, k, column) for column in columns]
            for index in range(max(map(len, lists))):
                sizes = np.array([own[index] if index < len(own) else 0 for own in lists])
                self.script.work("update", "averaging", self.speeds.streaming(_COPIED * sizes))
                takes = None if sizes.all() else sizes > 0
                call = self.replicas.all_reduce(
                    sizes, self.program.itemsize, k, "parameters", beside=True, takes=takes
                )
                self.script.meet(call)

    def rest(self) -> None:
        """What every step costs besides."""
        self.script.work("step", "step", self.speeds.each("step_s"))

    def _own(self, name: str) -> Seconds:
        """Bytes of a parameter that each rank moves."""
        size = self.program.pieces.sizes[name]
        k = self.program.plan.flow.weights[name].group_size
        return size / (self.replicas.count(k) if self.experiment.shard_optimizer else 1)

    def _hand_out(self, names: set[str] | None) -> None:
        """Makes the parameters whole again, bucket by bucket."""
        buckets = Buckets(self.program, names)
        sizes: dict[tuple[int, int], Counts] = {}
        for column, which in enumerate(buckets.of):
            numbers: dict[int, int] = {}
            for bucket in buckets.lists[which]:
                k = bucket.group_size
                key = (k, numbers.get(k, 0))
                numbers[k] = key[1] + 1
                sizes.setdefault(key, np.zeros_like(self.ones))[column] = bucket.bytes
        for (k, _), held in sizes.items():
            self.script.work("update", "hand-out", self.speeds.streaming(_HANDED_OUT * held))
            takes = None if held.all() else held > 0
            self.script.meet(self.replicas.all_gather(held, k, "parameters", takes))
