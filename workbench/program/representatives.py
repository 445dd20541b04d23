"""Ranks that are alike: of a large world, a few stand for all.

Shard groups are runs of ranks next to each other. With L the least common multiple of a plan's
group sizes, the world is a row of blocks of L ranks, and what ranks of a block do with each other
is the same in all blocks whose members have equal rows and devices, and equal hosts among them;
where there is a parameter server, its block is one of its own.
One block of each kind is kept, in their order. Sums over replicas then wait for the slowest of
those that are kept, which are the slowest of all.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment import Experiment, ParameterServer
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.program.rows import micro_batches


@dataclass(frozen=True, eq=False)
class Representatives:
    """The ranks that stand for a world.

    Attributes:
        world_size: of the world.
        ranks: those that stand for it, ascending, in whole blocks.
        column: for each rank of the world, which of `ranks` stands for it.
        batches: for each micro-batch, the rows of `ranks`.
    """

    world_size: int
    ranks: NDArray[np.int64]
    column: NDArray[np.int64]
    batches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, experiment: Experiment, machine: Machine | None) -> "Representatives":
        """Those of an experiment's world.

        At least two blocks are kept where there are two, so that what has replicas still has some.

        Args:
            experiment: whose.
            machine: that runs it; None: on which all ranks are alike.
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
        """Every rank stands for itself."""
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
    """The least common multiple of a plan's group sizes."""
    return math.lcm(*group_sizes_of(plan))


def group_sizes_of(plan: Plan) -> tuple[int, ...]:
    """The group sizes that a plan's placements have, ascending."""
    flow = plan.flow
    sizes = {layout.group_size for layout in (*flow.inputs.values(), *flow.outputs.values())}
    sizes |= {weight.group_size for weight in flow.weights.values()}
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
