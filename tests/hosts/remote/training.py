"""A small net, split over four ranks in groups of two, and what has to be so of it anywhere."""

import time
from collections.abc import Callable

from torch import nn

import workbench as wb

LONG_S = 300.0
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def experiment(world_size: int = 4) -> wb.Experiment:
    graph = wb.trace(NET, input_shape=(1, 8, 8))
    plan = wb.Plan.hybrid(graph, world_size=world_size, group_size=2)
    return wb.Experiment(
        plan=plan, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=10
    )


def trains(cluster: wb.Cluster) -> None:
    """Asserts that a split net trains, and computes what it does in one process."""
    told = experiment(len(cluster))
    run = cluster.train(told, module=NET).wait(LONG_S)
    assert run.state == "finished"
    assert run.metrics.step.max() == told.steps - 1
    found = cluster.verify(told.plan, module=NET)
    assert found.exact, found


def until(true: Callable[[], object], cluster: wb.Cluster, within_s: float = LONG_S) -> None:
    """Returns when it is so; else shows what the cluster has to say."""
    deadline = time.monotonic() + within_s
    while not true():
        events = [event.text for event in cluster.link.store.events()]
        assert time.monotonic() < deadline, events
        time.sleep(0.05)
