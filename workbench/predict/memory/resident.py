"""The memory that stays from step to step, in bytes, for each layer and rank.

    weights     parameters and buffers, as the plan places them
    optimizer   what it remembers of updated parameters: SGD nothing, with momentum one copy, Adam
                two and a count of steps; averaged weights, if there are any; and what a strategy
                of one's own remembers
    libraries   what cuBLAS keeps on a GPU, where the machine has measured it
    staging     memory for conversions and reductions between ranks of one host
    sums        of gradient buckets, which ranks of one host share
    in flight   gradients of earlier steps, which will be used in later ones, and their sums
    codec       what error feedback remembers of every gradient that is encoded

Ranks with GPUs of their own share no memory, and what nccl needs torch's allocator does not see.
Ranks on one GPU share its memory as those on one host share that.

A rank's staging is three slots of 2 MiB, and a page, for each group in which other ranks are on its
host. A bucket's sum is an n-th of it, where n ranks share it. (Buckets themselves hold the
gradients.)

Source: Rajbhandari et al. 2020 (arXiv:1910.02054, sec. 3) for the copies of optimizers.
"""

from collections.abc import Sequence

import numpy as np

from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import replica_groups, shard_groups
from workbench.program.buckets import Buckets, Pieces, copies, late, moved_by, updated
from workbench.program.rows import Counts, Groups
from workbench.program.step import Program

PAGE_BYTES = 4096
SLOTS = 3
SLOT_BYTES = 2**21
STAGING_BYTES = PAGE_BYTES + SLOTS * SLOT_BYTES
_NUMBER_BYTES = 4


def weight_bytes(pieces: Pieces) -> dict[str, Counts]:
    """Bytes of parameters and buffers [ranks], for each layer that has some."""
    return pieces.by_layer(pieces.sizes)


def optimizer_bytes(program: Program, buckets: Buckets) -> dict[str, Counts]:
    """Bytes of the optimizer's state [ranks], for each layer that has parameters."""
    experiment = program.experiment
    values = experiment.optimizers
    averages = experiment.ema is not None
    if not averages and not any(value.remembers.names for value in values.values()):
        return {}
    known: dict[tuple[int, int, int], Counts] = {}  # of the same pieces, as equal layers have them
    held = {}
    for name, size in moved_bytes(program, buckets).items():
        times, numbers = copies(values[name]) + averages, len(values[name].remembers.numbers)
        key = (id(size), times, numbers)
        if key not in known:
            known[key] = size * times + numbers * _NUMBER_BYTES * (size > 0)
        held[name] = known[key]
    return program.pieces.by_layer(held)


def remembered_bytes(program: Program, pieces: Pieces) -> dict[str, Counts]:
    """Bytes of what a strategy remembers of each parameter [ranks], by layer."""
    count = program.remembered
    held = {name: pieces.sizes[name] * count for name in pieces.names if count}
    return pieces.by_layer(held)


def moved_bytes(program: Program, buckets: Buckets) -> dict[str, Counts]:
    """Bytes of each parameter that each rank updates [ranks]."""
    experiment = program.experiment
    if isinstance(experiment.sync, ParameterServer):
        return _served(program, experiment.sync.server)
    cut = buckets if experiment.shard_optimizer else None
    return updated(program.pieces, cut, program.itemsize, experiment.optimizer_shares)


def staging_bytes(program: Program) -> Counts:
    """Bytes of staging on each rank [ranks], for all its groups with other ranks on its host."""
    found = np.zeros(program.plan.world_size, dtype=np.int64)
    for groups in _groups(program):
        found += (program.hosts.mates(groups) > 1) * STAGING_BYTES
    return found


def library_bytes(machine: Machine, ranks: Sequence[int]) -> Counts:
    """Bytes that libraries keep for themselves on these ranks [ranks]."""
    return np.array([machine.device(rank).library_bytes for rank in ranks], dtype=np.int64)


def sums_bytes(program: Program, buckets: Buckets) -> Counts:
    """Bytes of each rank's part of its buckets' sums [ranks], where it shares memory.

    If its update is fused, that is the part that it updates, and only where its whole group is on
    its host.
    """
    world, found = program.plan.world_size, np.zeros(program.plan.world_size, dtype=np.int64)
    experiment = program.experiment
    for column in buckets.columns() if experiment.fused else ():
        moved = moved_by(column, program.itemsize, experiment.optimizer_shares)
        mates = program.hosts.mates(replica_groups(column.group_size, world))
        found += sum(moved.values(), found * 0) * (mates == world // column.group_size)
    if experiment.fused:
        return found
    for column in buckets.columns():
        groups = replica_groups(column.group_size, world)
        mates, index = program.hosts.mates(groups), program.hosts.index(groups)
        numel = column.bytes // program.itemsize
        share = numel // mates + (index < numel % mates)
        found += share * (mates > 1) * program.itemsize
    return found * (1 + late(experiment))


def flying_bytes(program: Program) -> dict[str, Counts]:
    """Bytes of earlier steps' gradients, and of their weights if compensated [ranks], by layer."""
    count, weights = late(program.experiment), program.experiment.sync.timing.keeps_weights
    if count == 0:
        return {}
    held = {name: program.pieces.sizes[name] for name in program.pieces.names}
    return program.pieces.by_layer({n: s * count * (1 + weights) for n, s in held.items()})


def residual_bytes(program: Program) -> dict[str, Counts]:
    """Bytes of error feedback for the gradients that are encoded, for each layer [ranks]."""
    plan, (_, codec) = program.plan, program.experiment.sync.summing
    if codec is None or not codec.error_feedback:
        return {}
    count = 1 + late(program.experiment)
    placed = plan.flow.weights
    names = [n for n in program.pieces.names if placed[n].group_size < plan.world_size]
    return program.pieces.by_layer({n: program.pieces.sizes[n] * count for n in names})


def _served(program: Program, server: int) -> dict[str, Counts]:
    """Bytes of each parameter that each rank updates as a server [ranks]."""
    placed, ranks = program.plan.flow.weights, np.arange(program.plan.world_size)
    found = {}
    for name in program.pieces.names:
        k = placed[name].group_size
        found[name] = program.pieces.sizes[name] * (ranks // k == server // k)
    return found


def averaging_bytes(buckets: Buckets) -> Counts:
    """Bytes of the largest bucket that local SGD averages [ranks]."""
    largest = [max((bucket.bytes for bucket in own), default=0) for own in buckets.of_place]
    return np.array(largest, dtype=np.int64)[buckets.place]


def _groups(program: Program) -> list[Groups]:
    """The groups that ranks are in: for activations, gradients, norms and control."""
    plan, flow = program.plan, program.plan.flow
    crossings = [step for steps in (*flow.edges.values(), *flow.returns.values()) for step in steps]
    shard = {step.group_size for step in crossings}
    shard |= {flow.returned(name).group_size for name in plan.graph.outputs}
    replica = sorted({weight.group_size for weight in flow.weights.values()} | {1})
    norms = (layer for layer in plan.graph.layers if plan.synchronizes(layer))
    norm = {flow.inputs[layer.name].group_size for layer in norms}
    found: list[Groups] = [shard_groups(k, plan.world_size) for k in sorted(shard)]
    found += [replica_groups(k, plan.world_size) for k in (*replica, *sorted(norm))]
    return [*found, shard_groups(plan.world_size, plan.world_size)]
