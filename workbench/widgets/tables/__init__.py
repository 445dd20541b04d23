"""Live tables of a cluster: its jobs and its engines."""

from workbench.widgets.tables.cluster_view import ClusterView as ClusterView
from workbench.widgets.tables.job_table import JobTable as JobTable
