"""Live views of runs."""

from workbench.widgets.dashboard.dashboard import Dashboard as Dashboard
