"""What `%load_ext workbench` does."""

from typing import Any

from workbench.magics.completing import complete_ranks, complete_wb
from workbench.magics.magics import WorkbenchMagics


def register(shell: Any) -> None:
    """Adds `%wb` and `%%ranks`, and what the tab key offers after them, to an IPython shell."""
    shell.register_magics(WorkbenchMagics(shell))
    shell.set_hook("complete_command", complete_wb, str_key="%wb")
    shell.set_hook("complete_command", complete_ranks, str_key="%%ranks")
