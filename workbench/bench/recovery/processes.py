"""The processes of a cluster that are found and waited for from outside."""

import time
from contextlib import suppress

import psutil

from workbench.client.cluster import Cluster
from workbench.store.process import SUPERVISOR, holder

LOOK_S = 0.002


def controller_of(cluster: Cluster) -> int | None:
    """The process id of a cluster's controller; None while there is none."""
    supervisor = holder(cluster.folder / SUPERVISOR)
    with suppress(psutil.Error):
        for child in [] if supervisor is None else psutil.Process(supervisor.pid).children():
            if "ipyparallel.controller" in child.cmdline():
                return child.pid
    return None


def attached_again(cluster: Cluster, limit_s: float) -> Cluster:
    """The cluster whose supervisor was killed, attached to as another notebook would.

    Raises:
        TimeoutError: the supervisor does not end within the limit.
    """
    deadline = time.monotonic() + limit_s
    while holder(cluster.folder / SUPERVISOR) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError("the supervisor does not end")
        time.sleep(LOOK_S)
    return Cluster.attach(cluster.folder)
