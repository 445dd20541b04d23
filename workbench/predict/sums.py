"""Gradients summed over replicas, in buckets that start in their order while backward goes on.

A bucket starts when all of its gradients are there and the one before it has started. Where
ranks of a replica group close their buckets in different places, which unequal pieces beside
replicated layers can bring about, a sum starts with the last of them.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from workbench.plan.all_reduce import Algorithm
from workbench.predict.buckets import Bucket, Buckets
from workbench.predict.events import Script
from workbench.predict.replicas import Replicas


class Sums:
    """Writes the sums of one set of buckets.

    Args:
        buckets: of all ranks.
        names: parameters; only the buckets that hold them.
        replicas: who sums.
        script: to write on.
        itemsize: of a gradient.
        algorithm: of the sums.
    """

    def __init__(
        self,
        buckets: Buckets,
        names: Collection[str],
        replicas: Replicas,
        script: Script,
        itemsize: int,
        algorithm: Algorithm,
    ) -> None:
        self.replicas, self.script = replicas, script
        self.itemsize, self.algorithm = itemsize, algorithm
        self.place = buckets.place
        self.lists = [[b for b in own if b.names[0] in names] for own in buckets.of_place]
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
        """These gradients are there."""
        for home in self._home:
            for name in names:
                if name in home:
                    home[name].discard(name)
        self._send()

    def finish(self) -> None:
        """Starts what is left, and waits for all."""
        for own in self._waiting:
            for waiting in own:
                waiting.clear()
        self._send()
        for handle in self._handles:
            self.script.join(handle, "gradients")

    def _send(self) -> None:
        """Starts, in the order of the lists, the buckets that have become ready."""
        ready: dict[tuple[int, int], None] = {}
        for index, own in enumerate(self.lists):
            while self._next[index] < len(own) and not self._waiting[index][self._next[index]]:
                key = _key(own, self._next[index])
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
            own = [b for b in self.lists[index] if b.group_size == group_size]
            sizes[self.place == index] = own[number].bytes
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
        call = replicas.all_reduce(
            np.where(takes, sizes, 0),
            self.itemsize,
            group_size,
            "gradients",
            algorithm=self.algorithm,
            beside=True,
            shared=True,
            takes=None if takes.all() else takes,
        )
        self._handles.append(self.script.start(call))


def _key(own: Sequence[Bucket], index: int) -> tuple[int, int]:
    """(group size, which of the buckets of this group size) of a bucket in a list."""
    k = own[index].group_size
    return k, sum(bucket.group_size == k for bucket in own[:index])
