"""Live tables of a cluster: its jobs and its engines."""

from workbench.widgets.tables.engines import ClusterView as ClusterView
from workbench.widgets.tables.jobs import JobTable as JobTable
