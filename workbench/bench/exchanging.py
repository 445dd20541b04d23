"""What one engine does to find the constants of its network: exchanges of several sizes."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from workbench.comm.collectives import all_gather, start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import Seat, World
from workbench.plan.all_reduce import Algorithm
from workbench.plan.experiment import Experiment
from workbench.plan.placement import Shard
from workbench.predict.timing import Measurement
from workbench.train.loop.state import everyone, group_specs_of

ADDED = 2**20  # elements
ADDITIONS = 8


def measure(
    seat: Seat,
    experiment: Experiment,
    *,
    weights: Path,
    sizes: Sequence[int],
    algorithms: Sequence[Algorithm],
    times: int,
) -> tuple[list[Measurement], float]:
    """Times exchanges, on the slowest rank, and additions.

    Args:
        seat: where this rank sits.
        experiment: whose ranks exchange.
        weights: not needed.
        sizes: in bytes, of fp32.
        algorithms: each takes its turn at each size.
        times: how often.

    Returns:
        Each exchange as measured, and the seconds that adding a byte takes this rank (γ).
    """
    with World.open(seat) as world:
        group = everyone(world.groups(group_specs_of(experiment.plan)), experiment.plan)
        return exchanged(group, sizes, algorithms, times), seconds_to_add()


def exchanged(
    group: Group, sizes: Sequence[int], algorithms: Sequence[Algorithm], times: int
) -> list[Measurement]:
    """Times exchanges of so many bytes by each algorithm, in turn."""
    found = []
    for index in range(-1, times):
        for size in sizes:
            for name in algorithms:
                seconds = _exchange(group, size, name)
                if index >= 0:  # the first turn connects
                    found.append(Measurement(group.size, size, seconds, name))
    return found


def _exchange(group: Group, size: int, algorithm: Algorithm) -> float:
    each = Shard(0, (1,) * group.size)
    flat = torch.zeros(size // 4)
    all_gather(torch.zeros(1), each, group, layer="bench")  # all begin together
    began = time.perf_counter()
    start_all_reduce(flat, group, algorithm=algorithm).wait()
    seconds = torch.tensor([time.perf_counter() - began])
    return float(all_gather(seconds, each, group, layer="bench").max())


def seconds_to_add() -> float:
    """Of adding a byte on this rank (γ)."""
    a, b = torch.ones(ADDED), torch.ones(ADDED)
    a += b
    began = time.perf_counter()
    for _ in range(ADDITIONS):
        a += b
    return (time.perf_counter() - began) / (ADDITIONS * a.nbytes)
