"""What the tab key offers after `%wb` and `%%ranks`."""

from typing import Any

from workbench.magics.finding import named
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan

WORDS = ("status", "jobs", "open", "close")
OPTIONS = ("--ranks", "--quiet")


def complete_wb(shell: Any, event: Any) -> list[str]:
    """After `%wb`: its words; after `%wb open`: plans and experiments of the notebook."""
    before = event.line.split()
    if len(before) > 2 or (len(before) == 2 and event.line.endswith(" ")):
        names = shell.user_ns
        known = [*named(names, Plan), *named(names, Experiment)]
        return sorted(known) if before[1] == "open" else []
    return list(WORDS)


def complete_ranks(_shell: Any, _event: Any) -> list[str]:
    """After `%%ranks`: its options."""
    return list(OPTIONS)
