"""What a view shows, and the patches that bring it up to date.

columns    one value for each layer: patches hold indices and values of what changed
values     anything else by name: patches hold those that changed, whole
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.widgets.editor.rows import Columns


@dataclass(frozen=True)
class State:
    """Everything that a view needs, as JSON can hold it."""

    columns: Columns = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def difference(old: State, new: State) -> dict[str, Any]:
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


def patched(old: State, patch: Mapping[str, Any]) -> State:
    """What a view makes of a patch; `store.js` does the same."""
    columns = {name: list(column) for name, column in old.columns.items()}
    for name, (at, values) in patch.get("columns", {}).items():
        column = columns.setdefault(name, [])
        column.extend([None] * (max(at, default=-1) + 1 - len(column)))
        for index, value in zip(at, values, strict=True):
            column[index] = value
    return State(columns, {**old.values, **patch.get("values", {})})
