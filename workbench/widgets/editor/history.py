"""The plans that an editor had, one after another."""

from dataclasses import dataclass, replace

from workbench.plan.plan import Plan
from workbench.widgets.editor.figures import Totals


@dataclass(frozen=True)
class Entry:
    """A plan, the edit that led to it, and what was predicted for it, if that is known."""

    plan: Plan
    what: str
    totals: Totals | None = None


class History:
    """Plans to go back to, and forth again; a new one forgets what was undone.

    Args:
        plan: the first one.
        most: entries that are kept.
    """

    def __init__(self, plan: Plan, most: int = 200) -> None:
        self._entries, self._at, self._most = [Entry(plan, "")], 0, most

    @property
    def now(self) -> Entry:
        """The entry of the plan as it is."""
        return self._entries[self._at]

    @property
    def undoes(self) -> str | None:
        """The edit that `undo` takes back; None: there is none."""
        return self.now.what if self._at else None

    @property
    def redoes(self) -> str | None:
        """The edit that `redo` makes again; None: there is none."""
        after = self._entries[self._at + 1 :]
        return after[0].what if after else None

    @property
    def before(self) -> Entry | None:
        """The nearest entry before this one of which a prediction is known."""
        earlier = self._entries[: self._at]
        return next((entry for entry in reversed(earlier) if entry.totals is not None), None)

    def add(self, plan: Plan, what: str) -> None:
        """A new plan."""
        kept = self._entries[: self._at + 1][1 - self._most :]
        self._entries = [*kept, Entry(plan, what)]
        self._at = len(self._entries) - 1

    def undo(self) -> Plan:
        """Goes back to the plan before, if there is one."""
        self._at = max(0, self._at - 1)
        return self.now.plan

    def redo(self) -> Plan:
        """Goes on to the plan after, if there is one."""
        self._at = min(len(self._entries) - 1, self._at + 1)
        return self.now.plan

    def predicted(self, plan: Plan, totals: Totals) -> None:
        """Notes what was predicted for a plan, wherever it is."""
        self._entries = [
            replace(entry, totals=totals) if entry.plan is plan else entry
            for entry in self._entries
        ]

    def forget_predictions(self) -> None:
        """For another machine or experiment, with which none of them can be compared."""
        self._entries = [replace(entry, totals=None) for entry in self._entries]
