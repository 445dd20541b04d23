"""A process that owns a busy cluster, to be ended in several ways by the tests.

python owner.py DIRECTORY [raise]     says "busy" once its engines compute, then waits, or raises
python owner.py DIRECTORY start       starts a cluster, and may be interrupted at that
"""

import asyncio
import sys
import threading
from pathlib import Path

from tests.cluster.test_message import experiment
from tests.plan.graphs import mlp
from workbench.cluster import Cluster, Run
from workbench.plan import Plan


def busy(directory: str) -> tuple[Cluster, Run]:
    """A cluster whose two engines are in the middle of a run."""
    cluster = Cluster(2, directory=directory)
    cluster.task = "tests.cluster.fake_session:slowly"
    cluster._assistant.values_of = lambda _experiment, _module: Path("nowhere")
    plan = Plan.data_parallel(mlp(4, 4), 2)
    run = cluster.train(experiment(plan).replace(steps=10**9))
    started = threading.Event()
    run.subscribe(lambda rows: started.set() if rows else None)
    while not (started.wait(0.1) or run.rows):
        assert not run.is_done, run
    return cluster, run


async def within_a_running_loop(directory: str) -> tuple[Cluster, Run]:
    return busy(directory)


if __name__ == "__main__":
    how = sys.argv[2]
    if how == "start":
        Cluster(2, directory=sys.argv[1])
    else:
        owned = asyncio.run(within_a_running_loop(sys.argv[1]))
        print("busy", flush=True)
        raise ValueError("a notebook's mistake")
