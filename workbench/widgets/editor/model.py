"""The editor without a browser: a plan, its history, what is predicted, and what views show."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict
from typing import Any

from workbench.plan.experiment import Experiment
from workbench.plan.plan import BATCH_NORMS, Plan
from workbench.plan.tail import ROUNDS
from workbench.widgets.editor import edits, picture
from workbench.widgets.editor.figures import Figures
from workbench.widgets.editor.folding import Node, folded
from workbench.widgets.editor.history import History
from workbench.widgets.editor.rows import PLACED, Columns, cells, facts, shares_text
from workbench.widgets.editor.state import State, difference, differing


class Model:
    """What an editor shows of a plan; not thread-safe by itself.

    Args:
        plan: to begin with.
        experiment: that predictions are for.
    """

    def __init__(self, plan: Plan, experiment: Experiment) -> None:
        self.history, self.experiment = History(plan), experiment
        self.static = {
            "facts": facts(plan.graph),
            "nodes": [_plain(node) for node in folded(plan.graph)],
            "model": plan.graph.source.name,
            "presets": list(edits.PRESETS),
            "rounds": list(ROUNDS),
            "norms": list(BATCH_NORMS),
        }
        self._columns = cells(plan)
        self._values: dict[str, Any] = {
            "errors": {},
            "notes": [],
            "predicted": None,
            "complaint": "",
            "tasks": {},
            "edited": [],
            "also": [],
        }
        self._indices = {layer.name: i for i, layer in enumerate(plan.graph.layers)}
        self._sent = State()
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
        state = State(self._columns, dict(self._values))
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
            undo=self.history.undoes,
            redo=self.history.redoes,
            last=self.history.now.what,
            batch_size=experiment.batch_size,
            setting=f"{experiment.optimizer.kind}, {experiment.precision}",
            picture=[asdict(run) for run in picture.runs(plan)],
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
