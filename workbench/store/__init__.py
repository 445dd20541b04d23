"""What a cluster's processes know of each other: jobs and engines in SQLite, run folders, records.

Nothing here loads torch or ipyparallel.
"""

from workbench.store.cluster_spec import Profile as Profile
from workbench.store.errors import ClusterError as ClusterError
from workbench.store.errors import ControlMessageTooLarge as ControlMessageTooLarge
from workbench.store.errors import Diverged as Diverged
from workbench.store.errors import EngineDied as EngineDied
from workbench.store.errors import HostsError as HostsError
from workbench.store.errors import RankError as RankError
from workbench.store.errors import RunError as RunError
from workbench.store.errors import StoreError as StoreError
