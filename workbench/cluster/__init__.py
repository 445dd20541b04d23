"""Engines on this host: started, watched, and given experiments to run."""

from workbench.cluster.cluster import Cluster as Cluster
from workbench.cluster.emulated.hosts import Hosts as Hosts
from workbench.cluster.errors import ClusterError as ClusterError
from workbench.cluster.errors import ControlMessageTooLarge as ControlMessageTooLarge
from workbench.cluster.errors import Diverged as Diverged
from workbench.cluster.errors import EngineDied as EngineDied
from workbench.cluster.errors import HostsError as HostsError
from workbench.cluster.errors import RankError as RankError
from workbench.cluster.errors import RunError as RunError
from workbench.cluster.rebalancer import Rebalancer as Rebalancer
from workbench.cluster.run import Run as Run
