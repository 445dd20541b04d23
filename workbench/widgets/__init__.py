"""What a notebook shows: live views of the library's values and runs."""

from workbench.widgets.dashboard import Dashboard as Dashboard
