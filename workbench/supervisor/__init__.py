"""What owns a cluster's processes, and outlives the notebook that wanted them."""

from workbench.supervisor.starting import said as said
from workbench.supervisor.starting import start as start
from workbench.supervisor.starting import supervisor_of as supervisor_of
