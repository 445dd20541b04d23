"""When the gradients of each bucket can begin to be summed: when the last of them is there.

Buckets begin strictly in their order, one that is filled early behind those before it. Where ranks
of a replica group fill theirs in different places, which unequal pieces beside replicated layers
can bring about, a sum begins with the last of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from workbench.plan.experiment import Experiment, ParameterServer, Pipelined, Synchronous
from workbench.program.buckets import Bucket, Buckets
from workbench.program.instructions import Reduce, Updater

_Key = tuple[int, int]
"""(group size, which of the buckets over groups of this size)."""


class Reductions:
    """Follows gradients as they come, and gives the reductions that can begin.

    Args:
        experiment: says how gradients are summed.
        buckets: of the parameters whose gradients come.
    """

    def __init__(self, experiment: Experiment, buckets: Buckets) -> None:
        self._experiment, self._buckets = experiment, buckets
        self._columns = {(c.group_size, c.number): c for c in buckets.columns()}
        self._keys = [_keys(own) for own in buckets.of_place]
        self._places: dict[int, Mapping[int, set[int]]] = {}
        self.begin()

    def begin(self) -> None:
        """No gradient is there yet."""
        self._waiting = [[set(bucket.names) for bucket in own] for own in self._buckets.of_place]
        self._home = [{name: one for one in own for name in one} for own in self._waiting]
        self._next = [0] * len(self._waiting)
        self._come: dict[_Key, dict[int, int]] = {}  # the places, and behind which instruction
        self._begun: set[tuple[_Key, int]] = set()

    def settle(self, names: Iterable[str], index: int) -> Iterator[Reduce]:
        """The sums that begin since these gradients are there.

        Args:
            names: of their parameters.
            index: of the instruction that has made them.
        """
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
        column, come = self._columns[key], self._come[key]
        after = tuple(come.get(place, -1) for place in range(len(column.of_place)))
        if not isinstance(sync, Synchronous | Pipelined):
            return Reduce(column, members, to, "auto", None, after)
        if not self._experiment.fused:
            to = "holders"
        return Reduce(column, members, to, sync.algorithm, sync.codec, after)


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
    """That of each bucket of one place."""
    seen: Counter[int] = Counter()
    keys = []
    for bucket in own:
        keys.append((bucket.group_size, seen[bucket.group_size]))
        seen[bucket.group_size] += 1
    return keys
