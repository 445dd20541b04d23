"""A process that owns a busy cluster, to be ended in several ways by the tests.

Called with a directory and one of:

    raise     says "busy" once its engines compute; raises at a line of input
    idle      as raise, when its run has been stopped
    hosts     as raise, with one engine on each of two emulated hosts
    pause     as raise, with one of its engines paused
    keep      as raise, with a name for its cluster
    drop      drops its cluster and says "busy"; at a line of input ends its run
    start     starts a cluster, and may be interrupted at that
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from tests.client import leftovers
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.client.cluster import Cluster
from workbench.client.run import submitting
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan import Plan


def busy(
    directory: str, hosts: Hosts | None = None, name: str | None = None
) -> tuple[Cluster, Run]:
    """A cluster whose two engines are in the middle of a run."""
    cluster = Cluster(2, hosts=hosts, directory=directory, name=name, linger_s=0.5)
    cluster.task = "tests.client.fake_session:slowly"
    submitting.module_values = lambda *_: Path(__file__)
    plan = Plan.data_parallel(mlp(4, 4), 2)
    run = cluster.train(experiment(plan).replace(steps=10**9))
    started = threading.Event()
    run.subscribe(lambda rows: started.set() if rows else None)
    while not (started.wait(0.1) or run.rows):
        assert not run.is_done, run
    return cluster, run


def rows_of(run: Run) -> None:
    """Returns when more rows have come."""
    seen = len(run.rows)
    while len(run.rows) <= seen:
        assert not run.is_done, run
        time.sleep(0.02)


async def within_a_running_loop(*arguments: object) -> tuple[Cluster, Run]:
    return busy(*arguments)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # rather than a test that never ends
    how = sys.argv[2]
    if how == "start":
        Cluster(2, directory=sys.argv[1])
    elif how == "drop":
        cluster, run = busy(sys.argv[1])
        del cluster
        print("busy", flush=True)  # a run keeps its cluster
        sys.stdin.readline()
        run.stop()
        run.wait()
        print("gone" if leftovers.gone_within(os.getpid(), 60.0) else "here", flush=True)
    else:
        hosts = Hosts(2) if how == "hosts" else None
        name = "kept" if how == "keep" else None
        owned = asyncio.run(within_a_running_loop(sys.argv[1], hosts, name))
        if how == "pause":
            owned[0].pause(1)
        if how == "idle":
            owned[1].stop()
            owned[1].wait()
        print("busy", flush=True)
        sys.stdin.readline()
        raise ValueError("a notebook's mistake")
