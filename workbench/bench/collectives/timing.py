"""Timing of single collectives on engines, and of exchanges, to fit the constants of a network."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.model.tracing.trace import trace
from workbench.plan.collective.algorithm import AlgorithmName
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import Measurement
from workbench.train.measure.repeating import finish
from workbench.train.run.rank import everyone, group_specs_of

KIB, MIB = 2**10, 2**20
ADDED = MIB  # elements
ADDITIONS = 8
HOST = torch.device("cpu")

Seconds = dict[int, dict[str, list[float]]]
"""The seconds of each round, for each size in bytes and system."""


def experiment_of(engines: int) -> Experiment:
    """An experiment for engines that only communicate: only its world size matters."""
    graph = trace("squeezenet1_1", input_shape=(3, 64, 64), num_classes=10)
    return Experiment(
        plan=Plan.data_parallel(graph, engines),
        data=Synthetic(samples=64),
        batch_size=engines,
        optimizer=SGD(lr=0.01),
        steps=1,
    )


def timed(
    system: Callable[[], object], times: int, group: Group, device: torch.device = HOST
) -> float:
    """Seconds of one of `times` calls on the slowest rank; all ranks start together."""
    each = Shard(0, (1,) * group.size)
    finish(device)
    all_gather(torch.zeros(1), each, group)
    began = time.perf_counter()
    for _ in range(times):
        system()
    finish(device)
    seconds = torch.tensor([(time.perf_counter() - began) / times])
    return float(all_gather(seconds, each, group).max())


def named(size: int) -> str:
    """A size in bytes as text, such as "64KB"."""
    return f"{size // MIB}MB" if size >= MIB else f"{size // KIB}KB"


def measure(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    sizes: Sequence[int],
    algorithms: Sequence[AlgorithmName],
    times: int,
) -> tuple[list[Measurement], float]:
    """Times exchanges on the slowest rank, and additions.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment whose ranks exchange.
        weights: the file of initial weights, which is not used.
        sizes: the sizes of the exchanges, in bytes of fp32.
        algorithms: the algorithms, each of which takes its turn at each size.
        times: the number of turns.

    Returns:
        The measured exchanges, and the seconds that this rank takes to add a byte (γ).
    """
    with World.open(config) as world:
        group = everyone(world.groups(group_specs_of(experiment.plan)), experiment.plan)
        return exchanged(group, sizes, algorithms, times), seconds_to_add()


def exchanged(
    group: Group, sizes: Sequence[int], algorithms: Sequence[AlgorithmName], times: int
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


def _exchange(group: Group, size: int, algorithm: AlgorithmName) -> float:
    each = Shard(0, (1,) * group.size)
    flat = torch.zeros(size // 4)
    all_gather(torch.zeros(1), each, group, layer="bench")  # all begin together
    began = time.perf_counter()
    start_all_reduce(flat, group, algorithm=algorithm).wait()
    seconds = torch.tensor([time.perf_counter() - began])
    return float(all_gather(seconds, each, group, layer="bench").max())


def seconds_to_add() -> float:
    """The seconds that this rank takes to add a byte (γ)."""
    a, b = torch.ones(ADDED), torch.ones(ADDED)
    a += b
    began = time.perf_counter()
    for _ in range(ADDITIONS):
        a += b
    return (time.perf_counter() - began) / (ADDITIONS * a.nbytes)
