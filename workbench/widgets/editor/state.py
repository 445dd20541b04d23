"""The editor without a browser: a plan, its history, what is predicted, and what views show.

Views are brought up to date by patches of two kinds of things:

    columns    one value for each layer: patches hold indices and values of what changed
    values     anything else by name: patches hold those that changed, whole
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.rounds import ROUNDS
from workbench.plan.plans.plan import BATCH_NORMS, Plan
from workbench.widgets.editor import edits
from workbench.widgets.editor.forecast import Figures, Totals
from workbench.widgets.editor.rows import (
    PLACED,
    Columns,
    Node,
    cells,
    facts,
    folded,
    runs,
    shares_text,
)
from workbench.widgets.editor.target import Offered


@dataclass(frozen=True)
class Snapshot:
    """Everything that a view needs, as JSON can hold it."""

    columns: Columns = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def difference(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    """What turns `old` into `new`; {} where they are equal."""
    columns: dict[str, Any] = {}
    for name, column in new.columns.items():
        before = old.columns.get(name)
        if before is column:
            continue
        if before is None or len(before) != len(column):
            columns[name] = [list(range(len(column))), column]
            continue
        at = differing(before, column)
        if at:
            columns[name] = [at, [column[i] for i in at]]
    none = object()
    values = {
        name: value for name, value in new.values.items() if old.values.get(name, none) != value
    }
    found: dict[str, Any] = {}
    if columns:
        found["columns"] = columns
    if values:
        found["values"] = values
    return found


def differing(old: list[Any], new: list[Any]) -> list[int]:
    """Where two columns of one length differ."""
    if old == new:  # as most do, and lists are soon compared
        return []
    return [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]


@dataclass(frozen=True)
class HistoryEntry:
    """A plan, the edit that led to it, and what was predicted for it, if that is known."""

    plan: Plan
    what: str
    totals: Totals | None = None


class History:
    """Plans to go back to, and forth again; a new one forgets what was undone."""

    def __init__(self, plan: Plan, most: int = 200) -> None:
        self._entries, self._at, self._most = [HistoryEntry(plan, "")], 0, most

    @property
    def now(self) -> HistoryEntry:
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
    def before(self) -> HistoryEntry | None:
        """The nearest entry before this one of which a prediction is known."""
        earlier = self._entries[: self._at]
        return next((entry for entry in reversed(earlier) if entry.totals is not None), None)

    def add(self, plan: Plan, what: str) -> None:
        """A new plan."""
        kept = self._entries[: self._at + 1][1 - self._most :]
        self._entries = [*kept, HistoryEntry(plan, what)]
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


class EditorModel:
    """What an editor shows of a plan; not thread-safe by itself."""

    def __init__(self, plan: Plan, experiment: Experiment, offered: Offered | None = None) -> None:
        self.history, self.experiment = History(plan), experiment
        self.offered = Offered() if offered is None else offered
        self.offered.take(plan)
        self.static = {
            "facts": facts(plan.graph, self.offered),
            "nodes": [_plain(node) for node in folded(plan.graph)],
            "model": plan.graph.source.name,
            "rules": self.offered.menu(),
            "rounds": list(ROUNDS),
            "norms": list(BATCH_NORMS),
            "tokens": any(w.of_tokens for one in plan.graph.layers for w in one.propagations),
        }
        self._columns = cells(plan)
        self._values: dict[str, Any] = {
            "errors": {},
            "notes": list(self.offered.complaints),
            "predicted": None,
            "complaint": "",
            "tasks": {},
            "edited": [],
            "also": [],
        }
        self._indices = {layer.name: i for i, layer in enumerate(plan.graph.layers)}
        self._sent = Snapshot()
        self.version = 0
        self._describe()

    @property
    def plan(self) -> Plan:
        """The plan as it is."""
        return self.history.now.plan

    @property
    def names(self) -> Set[str]:
        """Of all layers."""
        return self._indices.keys()

    def index(self, name: str) -> int:
        """A layer's place in the columns."""
        return self._indices[name]

    def take(self, plan: Plan, what: str, notes: Iterable[str] = ()) -> None:
        """Goes on with another plan of the same model, unless it is the one at hand."""
        if plan is not self.plan:
            self.history.add(plan, what)
        self._show(notes)

    def offer(self, plan: Plan) -> bool:
        """Offers a plan's own schemes from now on; whether views have to begin anew for them."""
        new = self.offered.take(plan)
        if new:
            self.static = {**self.static, "facts": facts(plan.graph, self.offered)}
        return new

    def undo(self) -> Plan:
        """Goes back by one edit."""
        return self.history.undo()

    def redo(self) -> Plan:
        """Goes on by one edit that was undone."""
        return self.history.redo()

    def refuse(self, places: Iterable[str], reason: str) -> None:
        """Marks cells ("12:shares", "rounds") with why what was wanted of them cannot be."""
        self._values["errors"] = dict.fromkeys(places, reason)

    def clear_errors(self) -> None:
        """Nothing is wrong any more."""
        self._values["errors"] = {}

    def run_with(self, experiment: Experiment) -> None:
        """Another experiment: what was predicted before cannot be compared with it."""
        self.experiment = experiment
        self.history.forget_predictions()
        self._describe()

    def predicted(self, plan: Plan, figures: Figures) -> None:
        """What was predicted for a plan; of an earlier one, its totals are kept."""
        self.history.predicted(plan, figures.totals)
        if plan is not self.plan:
            return
        before = self.history.before
        self._columns = {**self._columns, **figures.layers}
        self._values["complaint"] = ""
        self._values["predicted"] = {
            "rank": figures.rank,
            "totals": asdict(figures.totals),
            "before": None if before is None else asdict(before.totals or figures.totals),
            "ranks": figures.ranks,
            "step": figures.step,
            "notes": figures.notes,
        }
        self._values["pending"] = False

    def cannot_predict(self, plan: Plan, reason: str) -> None:
        """Why there is no prediction."""
        if plan is self.plan:
            self._values["complaint"], self._values["pending"] = reason, False

    def task(self, name: str, state: Mapping[str, Any]) -> None:
        """Where something that takes longer stands: "suggest", "verify", "apply", "file" ..."""
        self._values["tasks"] = {**self._values["tasks"], name: dict(state)}

    def say(self, **values: Any) -> None:
        """Sets other values that views show."""
        self._values.update(values)

    def patch(self) -> dict[str, Any]:
        """What changed since the last patch, or since the state; {} for nothing."""
        state = Snapshot(self._columns, dict(self._values))
        found = difference(self._sent, state)
        self._sent = state
        if found:
            self.version += 1
            found["version"] = self.version
        return found

    def state(self) -> dict[str, Any]:
        """Everything, for a view that begins."""
        return {
            "static": self.static,
            "columns": self._columns,
            "values": dict(self._values),
            "version": self.version,
        }

    @property
    def values(self) -> Mapping[str, Any]:
        """What views show besides the columns."""
        return self._values

    @property
    def columns(self) -> Columns:
        """What views show of each layer."""
        return self._columns

    def _show(self, notes: Iterable[str]) -> None:
        old, new = self._columns, cells(self.plan)
        own, placed = _changed(old, new, _CHOSEN), _changed(old, new, PLACED)
        self._columns = {**old, **new}
        self._values.update(errors={}, notes=list(notes))
        self._values.update(edited=sorted(own), also=sorted(placed - own))
        self._describe()

    def _describe(self) -> None:
        plan, experiment = self.plan, self.experiment
        self._values.update(
            world_size=plan.world_size,
            groups=edits.options_of(plan.world_size),
            rounds=plan.rounds,
            batch_norm=plan.batch_norm,
            rows=shares_text(plan.row_shares),
            tokens=edits.tokens_text(plan.shard_tokens),
            undo=self.history.undoes,
            redo=self.history.redoes,
            last=self.history.now.what,
            batch_size=experiment.batch_size,
            setting=f"{experiment.optimizer.kind}, {experiment.precision}",
            picture=[asdict(run) for run in runs(plan)],
            pending=True,
        )


_CHOSEN = ("scheme", "group", "shares", "recompute")


def _changed(old: Columns, new: Columns, names: Iterable[str]) -> set[int]:
    """The layers of which some of these columns differ."""
    found: set[int] = set()
    for name in names:
        found.update(differing(old[name], new[name]))
    return found


def _plain(node: Node) -> dict[str, Any]:
    """A node as JSON holds it: a leaf is the index of its layer."""
    if node.kind == "layer":
        return {"label": node.label, "layer": node.layers[0]}
    return {
        "kind": node.kind,
        "label": node.label,
        "count": node.count,
        "children": [_plain(child) for child in node.children],
    }
