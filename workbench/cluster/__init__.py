"""Engines on this host and others: started, watched, and given experiments to run.

Names are loaded when they are first used: the job server, which only schedules, imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.cluster.cluster import Cluster as Cluster
    from workbench.cluster.emulated.hosts import Hosts as Hosts
    from workbench.cluster.errors import ClusterError as ClusterError
    from workbench.cluster.errors import ControlMessageTooLarge as ControlMessageTooLarge
    from workbench.cluster.errors import Diverged as Diverged
    from workbench.cluster.errors import EngineDied as EngineDied
    from workbench.cluster.errors import HostsError as HostsError
    from workbench.cluster.errors import RankError as RankError
    from workbench.cluster.errors import RunError as RunError
    from workbench.cluster.launchers.profile import Profile as Profile
    from workbench.cluster.rebalancer import Rebalancer as Rebalancer
    from workbench.cluster.run import Run as Run

_HOME = {
    name: home
    for home, names in {
        "cluster": "Cluster",
        "emulated.hosts": "Hosts",
        "launchers.profile": "Profile",
        "errors": (
            "ClusterError ControlMessageTooLarge Diverged EngineDied HostsError RankError RunError"
        ),
        "rebalancer": "Rebalancer",
        "run": "Run",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'workbench.cluster' has no attribute {name!r}") from None
    return getattr(import_module(f"workbench.cluster.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
