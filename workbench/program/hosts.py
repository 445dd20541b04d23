"""Which ranks share memory: it decides how they sum, and what they stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.program.rows import Counts

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Hosts:
    """Ranks on hosts, in their order: the first ones on the first host, and so on.

    Attributes:
        ranks: how many each host has; they share its memory. A rank that shares none is a host
            of its own.
    """

    ranks: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, ranks_per_host: int | None = None) -> "Hosts":
        """As many ranks on every host, but for the last; None: all of them on one."""
        n = min(ranks_per_host or world_size, world_size)
        full, rest = divmod(world_size, n)
        return cls((n,) * full + ((rest,) if rest else ()))

    def over(self, groups: Groups) -> list[tuple[int, ...]]:
        """For each group, how many of its ranks each host has, but for hosts with none.

        The ranks of a group are in ascending order, and so in that of their hosts.
        """
        if len(self.ranks) == 1:
            return [(len(members),) for members in groups]
        host = self._host[np.asarray(groups)]
        patterns = []
        for row in host:
            _, counts = np.unique(row, return_counts=True)
            patterns.append(tuple(counts.tolist()))
        return patterns

    def mates(self, groups: Groups) -> Counts:
        """For each rank of the world, how many of its group are on its host, itself included."""
        found = np.ones(sum(self.ranks), dtype=np.int64)
        for members, pattern in zip(groups, self.over(groups), strict=True):
            found[list(members)] = np.repeat(pattern, pattern)
        return found

    def index(self, groups: Groups) -> Counts:
        """For each rank of the world, its place among those of its group that are on its host."""
        found = np.zeros(sum(self.ranks), dtype=np.int64)
        for members, pattern in zip(groups, self.over(groups), strict=True):
            found[list(members)] = np.concatenate([np.arange(n) for n in pattern])
        return found

    @property
    def _host(self) -> Counts:
        return np.repeat(np.arange(len(self.ranks)), self.ranks)
