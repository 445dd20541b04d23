"""What stays in memory from step to step, in bytes, for each layer and rank.

    weights     parameters and buffers, as the plan places them
    optimizer   SGD nothing, with momentum one copy of the parameters, Adam two and a step count
    shared      staging, and the sums of gradient buckets: memory that ranks of one host share

A rank's staging is three slots of 2 MiB, and a page, for each group that it is in. A bucket's
sum is a k-th of it, where k ranks share it. (Buckets themselves hold the gradients.)

Source: Rajbhandari et al. 2020 (arXiv:1910.02054, sec. 3) for the copies of optimizers.
"""

import numpy as np

from workbench.plan.experiment import SGD, Experiment, LocalSGD
from workbench.plan.mesh import replica_group
from workbench.plan.placement import apportion
from workbench.plan.plan import Plan
from workbench.predict.parameters import BYTES, Pieces, averaged, buckets_of, copies
from workbench.predict.rows import Counts

PAGE_BYTES = 4096
SLOTS = 3
SLOT_BYTES = 2**21
STAGING_BYTES = PAGE_BYTES + SLOTS * SLOT_BYTES
_STEP_COUNT_BYTES = 4


def weight_bytes(pieces: Pieces) -> dict[str, Counts]:
    """Parameters and buffers of each layer that has some."""
    return pieces.by_layer(pieces.sizes)


def optimizer_bytes(experiment: Experiment, pieces: Pieces) -> dict[str, Counts]:
    """The optimizer's memory of each layer's parameters."""
    times = copies(experiment.optimizer)
    if times == 0:
        return {}
    count = 0 if isinstance(experiment.optimizer, SGD) else _STEP_COUNT_BYTES
    held = {name: pieces.sizes[name] for name in pieces.names}
    return pieces.by_layer({n: size * times + count * (size > 0) for n, size in held.items()})


def shared_bytes(experiment: Experiment, pieces: Pieces) -> dict[str, Counts]:
    """Staging of all groups, and the sums of gradient buckets, where all ranks share memory."""
    plan = experiment.plan
    groups = groups_of_a_rank(plan)
    staging = np.full(plan.world_size, groups * STAGING_BYTES, dtype=np.int64)
    return {"staging": staging, "sums of gradients": _sums(experiment, pieces)}


def groups_of_a_rank(plan: Plan) -> int:
    """Groups of two or more ranks that each rank is in: activations, gradients, norms, control."""
    flow, world = plan.flow, plan.world_size
    crossings = [step for steps in (*flow.edges.values(), *flow.returns.values()) for step in steps]
    shard = {step.group_size for step in crossings}
    shard |= {flow.returned(name).group_size for name in plan.graph.outputs}
    replica = {weight.group_size for weight in flow.weights.values()} | {1}
    norm: set[int] = set()
    if plan.batch_norm == "synchronized":
        norms = (layer for layer in plan.graph.layers if layer.kind == "batch_norm")
        norm = {flow.inputs[layer.name].group_size for layer in norms}
    apart = sum(world // k > 1 for k in (*replica, *norm))
    return sum(k > 1 for k in shard) + apart + int(world > 1)


def averaging_bytes(experiment: Experiment, sync: LocalSGD, pieces: Pieces) -> Counts:
    """The room of the largest bucket of parameters that local SGD averages."""
    world = experiment.plan.world_size
    groups = {experiment.plan.flow.weights[name].group_size for name in pieces.names} - {world}
    largest = [
        max((n for k in groups for n in averaged(experiment, sync, pieces, k, rank)), default=0)
        for rank in range(world)
    ]
    return np.array(largest, dtype=np.int64)


def _sums(experiment: Experiment, pieces: Pieces) -> Counts:
    plan, element = experiment.plan, BYTES[experiment.precision]
    found = np.zeros(plan.world_size, dtype=np.int64)
    known: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank in range(plan.world_size):
        # Ranks at one place of their groups hold the same pieces, and so have equal buckets.
        sizes = {w.group_size for w in plan.flow.weights.values()}
        place = tuple(rank % k for k in sorted(sizes))
        if place not in known:
            known[place] = [
                (b.group_size, b.bytes // element) for b in buckets_of(experiment, pieces, rank)
            ]
        for k, numel in known[place]:
            members = replica_group(rank, k, plan.world_size)
            share = apportion(numel, (1,) * len(members))[members.index(rank)]
            found[rank] += share * element
    return found
