"""Timing of collectives, shared by the benchmarks of single exchanges."""

import time
from collections.abc import Callable

import torch

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plan import Plan

KIB, MIB = 2**10, 2**20

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


def timed(system: Callable[[], object], times: int, group: Group) -> float:
    """Seconds of one of `times` calls on the slowest rank; all ranks start together."""
    each = Shard(0, (1,) * group.size)
    all_gather(torch.zeros(1), each, group)
    began = time.perf_counter()
    for _ in range(times):
        system()
    seconds = torch.tensor([(time.perf_counter() - began) / times])
    return float(all_gather(seconds, each, group).max())


def named(size: int) -> str:
    """A size in bytes as text, such as "64KB"."""
    return f"{size // MIB}MB" if size >= MIB else f"{size // KIB}KB"
