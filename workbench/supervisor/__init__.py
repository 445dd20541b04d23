"""What owns a cluster's processes, and outlives the notebook that wanted them."""

from workbench.supervisor.starting import keeper_of as keeper_of
from workbench.supervisor.starting import said as said
from workbench.supervisor.starting import start as start
