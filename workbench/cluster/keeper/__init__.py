"""What owns a cluster's processes, and outlives the notebook that wanted them."""

from workbench.cluster.keeper.spec import Spec as Spec
from workbench.cluster.keeper.spec import identity as identity
from workbench.cluster.keeper.starting import keeper_of as keeper_of
from workbench.cluster.keeper.starting import said as said
from workbench.cluster.keeper.starting import start as start
