"""The rows of each pass, and the ranks that have them: all ranks of the world at once.

Of a large world, a few ranks stand for all. Shard groups are runs of ranks next to each other.
With L the least common multiple of a plan's group sizes, the world is a row of blocks of L ranks,
and what ranks of a block do with each other is the same in all blocks whose members have equal
rows and devices, and equal hosts among them; a parameter server's block is one of its own.
One block of each kind is kept, in their order. Sums over replicas then wait for the slowest of
those that are kept, which are the slowest of all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.experiment import Experiment, ParameterServer
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import ROWS, Layout, Shard, shared_out
from workbench.plan.plans.plan import Plan

Counts = NDArray[np.int64]


class Rows:
    """The rows of one pass: a whole batch, a micro-batch or a round."""

    def __init__(self, own: Sequence[int]) -> None:
        self.own: Counts = np.asarray(own, dtype=np.int64)
        self._hash: int | None = None
        self._over: dict[int, Counts] = {1: self.own}
        self._elements: dict[tuple[int, tuple[int, ...], int], tuple[Layout, Counts]] = {}

    @property
    def world_size(self) -> int:
        return len(self.own)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Rows) and np.array_equal(self.own, other.own))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.own.tobytes())
        return self._hash

    def __repr__(self) -> str:
        return f"Rows({self.own.tolist()})"

    def over(self, group_size: int) -> Counts:
        """For each rank, the rows of its whole shard group."""
        if group_size not in self._over:
            groups = self.own.reshape(-1, group_size).sum(axis=1)
            self._over[group_size] = np.repeat(groups, group_size)
        return self._over[group_size]

    def elements(self, layout: Layout, shape: tuple[int, ...], per_sample: int) -> Counts:
        """Elements that each rank holds of an activation.

        Args:
            per_sample: Rows of dimension 0 for each sample; 0: independent of the batch.
        """
        key = (id(layout), shape, per_sample)  # a layout is slow to hash
        found = self._elements.get(key)
        if found is None:  # it is kept with what was found, so that no other has its place
            found = self._elements[key] = layout, self._count(layout, shape, per_sample)
        return found[1]

    def _count(self, layout: Layout, shape: tuple[int, ...], per_sample: int) -> Counts:
        if per_sample == 0:
            return np.full(self.world_size, math.prod(shape), dtype=np.int64)
        rows = (self.own if layout == ROWS else self.over(layout.group_size)) * per_sample
        return rows * features(layout, shape, self.world_size)


def features(layout: Layout, shape: tuple[int, ...], world_size: int) -> Counts:
    """Elements of one sample that each rank holds."""
    cut = layout.placement
    if not isinstance(cut, Shard):
        return np.full(world_size, math.prod(shape), dtype=np.int64)
    others = math.prod(shape[: cut.dim - 1]) * math.prod(shape[cut.dim :])
    return tiled(cut.in_one_block.sizes, world_size) * others


def tiled(sizes: Sequence[int], world_size: int) -> Counts:
    """The sizes of one group's members, for every rank of the world."""
    return np.tile(np.asarray(sizes, dtype=np.int64), world_size // len(sizes))


def micro_batches(experiment: Experiment, count: int | None = None) -> list[tuple[int, ...]]:
    """For each micro-batch of a step, the rows of each rank.

    Args:
        count: the rows of a short batch, of which no micro-batch is empty; None: a whole batch.
    """
    every = experiment.batch_size if count is None else count
    counts = shared_out(every, None, experiment.accumulate)
    return [experiment.plan.rows_of(count) for count in counts if count]


@dataclass(frozen=True, eq=False)
class Representatives:
    """The ranks that stand for a world.

    Attributes:
        ranks: the ranks that stand for it, ascending, in whole blocks.
        column: the index in `ranks` of the one that stands for each rank of the world.
    """

    world_size: int
    ranks: NDArray[np.int64]
    column: NDArray[np.int64]
    batches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, experiment: Experiment, machine: Machine | None) -> "Representatives":
        """Those of an experiment's world.

        At least two blocks are kept where there are two, so that what has replicas still has some.
        """
        world = experiment.plan.world_size
        block = block_of(experiment.plan)
        rows = np.array(micro_batches(experiment), dtype=np.int64)
        starts = np.arange(0, world, block)
        facts = rows.T.reshape(len(starts), -1)
        serves = (starts == _server(experiment) // block * block)[:, None]
        shares = np.array(experiment.optimizer_shares).reshape(len(starts), -1)
        devices, hosts = _devices(machine, world, block), _hosts(machine, starts, block)
        facts = np.hstack([facts, serves, devices, hosts, shares])
        _, first, kind = np.unique(facts, axis=0, return_index=True, return_inverse=True)
        chosen = np.sort(first)
        if len(chosen) == 1 < len(starts):
            chosen = np.array([chosen[0], chosen[0] + 1])
        stands = np.searchsorted(chosen, first[kind.reshape(-1)])
        within = np.arange(block)
        ranks = (starts[chosen][:, None] + within).reshape(-1)
        column = (stands[:, None] * block + within).reshape(-1)
        return cls(world, ranks, column, tuple(tuple(own[ranks].tolist()) for own in rows))

    @classmethod
    def all_of(cls, experiment: Experiment) -> "Representatives":
        every = np.arange(experiment.plan.world_size)
        return cls(len(every), every, every, tuple(micro_batches(experiment)))

    def reduced(self, experiment: Experiment) -> Experiment:
        """The experiment of a world of only these ranks."""
        if len(self.ranks) == self.world_size:
            return experiment
        sync = experiment.sync
        if isinstance(sync, ParameterServer):
            sync = sync.replace(server=int(self.column[sync.server]))
        plan = experiment.plan.with_world_size(len(self.ranks))
        shares = experiment.shard_optimizer
        if not isinstance(shares, bool):
            shares = tuple(shares[rank] for rank in self.ranks.tolist())
        return experiment.replace(plan=plan, sync=sync, shard_optimizer=shares)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Representatives)
            and self.world_size == other.world_size
            and self.batches == other.batches
            and np.array_equal(self.ranks, other.ranks)
            and np.array_equal(self.column, other.column)
        )

    def __hash__(self) -> int:
        return hash((self.world_size, self.batches))


def block_of(plan: Plan) -> int:
    return math.lcm(*group_sizes_of(plan))


def group_sizes_of(plan: Plan) -> tuple[int, ...]:
    flow = plan.flow
    sizes = {layout.group_size for layout in (*flow.inputs.values(), *flow.outputs.values())}
    steps = (*flow.edges.values(), *flow.returns.values())
    return tuple(sorted(sizes | {step.group_size for path in steps for step in path}))


def _server(experiment: Experiment) -> int:
    sync = experiment.sync
    return sync.server if isinstance(sync, ParameterServer) else -1


def _devices(machine: Machine | None, world: int, block: int) -> NDArray[np.int64]:
    if machine is None or len(machine.devices) == 1:
        return np.zeros((world // block, 0), dtype=np.int64)
    known = [machine.devices.index(machine.device(rank)) for rank in range(world)]
    return np.array(known, dtype=np.int64).reshape(-1, block)


def _hosts(machine: Machine | None, starts: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """Of each block, on which host its members are, counted from that of its first one."""
    if machine is None or machine.ranks_per_host is None:
        return np.zeros((len(starts), 0), dtype=np.int64)
    hosts = (starts[:, None] + np.arange(block)) // machine.ranks_per_host
    return hosts - hosts[:, :1]


Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class HostLayout:
    """Ranks on hosts, in their order: the first ones on the first host, and so on."""

    ranks: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, ranks_per_host: int | None = None) -> "HostLayout":
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
