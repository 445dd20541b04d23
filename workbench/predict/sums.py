"""Gradients summed over replicas, in buckets that start in their order while backward goes on.

A bucket starts when all of its gradients are there and the one before it has started. Where
ranks of a replica group close their buckets in different places, which unequal pieces beside
replicated layers can bring about, a sum starts with the last of them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from workbench.plan.experiment import Experiment, LocalSGD, ParameterServer, Pipelined
from workbench.predict.events import Call, Script
from workbench.predict.replicas import Replicas, some
from workbench.program.buckets import Bucket, Buckets
from workbench.program.rows import Counts


class Sums:
    """Writes the sums of one set of buckets.

    Args:
        buckets: of all ranks.
        names: parameters; only the buckets that hold them.
        replicas: who sums.
        script: to write on.
        itemsize: of a gradient.
        experiment: says how they are summed, and how many steps later they are waited for.
    """

    def __init__(
        self,
        buckets: Buckets,
        names: Collection[str],
        replicas: Replicas,
        script: Script,
        itemsize: int,
        experiment: Experiment,
    ) -> None:
        sync = experiment.sync
        self.replicas, self.script = replicas, script
        self.itemsize, self.experiment, self.sync = itemsize, experiment, sync
        self.late = sync.width - 1 if isinstance(sync, Pipelined) else 0
        self.place = buckets.place
        self.lists = [
            [b for b in own if b.names[0] in names and replicas.count(b.group_size) > 1]
            for own in buckets.of_place
        ]
        self._keys = [_keys(own) for own in self.lists]
        self._bytes = [
            {key: bucket.bytes for key, bucket in zip(keys, own, strict=True)}
            for keys, own in zip(self._keys, self.lists, strict=True)
        ]
        self.begin()

    def begin(self) -> None:
        """Nothing is there yet."""
        self._waiting = [[set(b.names) for b in own] for own in self.lists]
        self._home = [{n: w for w in own for n in w} for own in self._waiting]
        self._next = [0] * len(self.lists)
        self._come: dict[tuple[int, int], set[int]] = {}
        self._begun: set[tuple[int, int, int]] = set()
        self._handles: list[int] = []

    def settle(self, names: Iterable[str]) -> None:
        """These gradients are there; those that are used late travel all at once."""
        if self.late:
            return
        filled = False
        for home in self._home:
            for name in names:
                waiting = home.get(name)
                if waiting is not None:
                    waiting.discard(name)
                    filled = filled or not waiting
        if filled:
            self._send()

    def finish(self) -> None:
        """Starts what is left, and waits for all; late ones, for those of so many steps ago."""
        for own in self._waiting:
            for waiting in own:
                waiting.clear()
        self._send()
        for handle in self._handles:
            self.script.join(handle, "gradients", self.late)

    def _send(self) -> None:
        """Starts, in the order of the lists, the buckets that have become ready."""
        ready: dict[tuple[int, int], None] = {}
        for index, own in enumerate(self.lists):
            while self._next[index] < len(own) and not self._waiting[index][self._next[index]]:
                key = self._keys[index][self._next[index]]
                self._come.setdefault(key, set()).add(index)
                ready.setdefault(key)
                self._next[index] += 1
        for key in ready:
            self._start(*key)

    def _start(self, group_size: int, number: int) -> None:
        """Starts the sums of all groups whose members have come to this bucket."""
        replicas = self.replicas
        member_of = replicas.ranks.ranks % group_size
        sizes = np.zeros_like(member_of)
        for index in self._come[group_size, number]:
            sizes[self.place == index] = self._bytes[index][group_size, number]
        takes = sizes > 0
        for member in range(group_size):
            mine = member_of == member
            begun = (group_size, number, member)
            if begun in self._begun or not takes[mine].all():
                takes = takes & ~mine
            else:
                self._begun.add(begun)
        if not takes.any():
            return
        self._handles.append(self.script.start(self._call(np.where(takes, sizes, 0), group_size)))

    def _call(self, sizes: Counts, group_size: int) -> Call:
        replicas, sync = self.replicas, self.sync
        if isinstance(sync, ParameterServer):
            return replicas.to_server(sizes, group_size, replicas.serves(sync.server, group_size))
        assert not isinstance(sync, LocalSGD)
        if self.experiment.fused:
            return replicas.to_owners(sizes, group_size, self.experiment.optimizer_shares)
        return replicas.all_reduce(
            sizes,
            self.itemsize,
            group_size,
            "gradients",
            algorithm=sync.algorithm,
            beside=True,
            shared=True,
            codec=sync.codec,
            takes=some(sizes),
        )


def _keys(own: Sequence[Bucket]) -> list[tuple[int, int]]:
    """(group size, which of the buckets of this group size) of each bucket of a list."""
    seen: Counter[int] = Counter()
    keys = []
    for bucket in own:
        keys.append((bucket.group_size, seen[bucket.group_size]))
        seen[bucket.group_size] += 1
    return keys
