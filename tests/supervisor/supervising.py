"""Clusters that a supervisor has, for the tests."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from workbench.client.lifecycle import cluster_spec
from workbench.hosts.processes import members
from workbench.store.cluster_spec import ClusterSpec, identity
from workbench.store.cluster_store import STORE
from workbench.store.store import Store
from workbench.supervisor import said

SOON_S = 60.0  # on a busy host, too


def spec(num_engines: int, **others: Any) -> ClusterSpec:
    found, _ = cluster_spec(num_engines, timeout_s=30.0, linger_s=60.0)
    return replace(found, **{"server": "tests.supervisor.greeter", **others})


def until(true: Callable[[], Any], folder: Path, within_s: float = SOON_S) -> Any:
    """What `true` says, once it is something."""
    deadline = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.01)
    return found


def processes(folder: Path) -> list[psutil.Process]:
    """All of a cluster, its supervisor aside."""
    return list(members(identity(folder)))


def idle(folder: Path, store: Store | None = None) -> bool:
    """Whether all engines are ready."""
    engines = (store or Store(folder / STORE)).engines()
    return bool(engines) and all(engine.state == "idle" for engine in engines)
