"""Values as TOML that a person can read and edit."""

from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.items import InlineTable, Table


def dump(tables: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> str:
    """Two levels of tables, then one line for each entry: nested values stand in the line.

    A list of mappings becomes a multi-line array with one mapping on each line; at the top
    level, one table for each (`[[name]]`).
    """
    document = tomlkit.document()
    for name, entries in tables.items():
        if isinstance(entries, Mapping):
            document.add(name, _table(entries))
        else:
            several = tomlkit.aot()
            for each in entries:
                several.append(_table(each))
            document.add(name, several)
    return tomlkit.dumps(document)


def _table(entries: Mapping[str, Any]) -> Table:
    table: Table = tomlkit.table()
    for key, value in entries.items():
        rows = isinstance(value, list | tuple) and value and isinstance(value[0], Mapping)
        table.add(key, _item(value).multiline(True) if rows else _item(value))
    return table


def _item(value: Any) -> Any:
    if isinstance(value, Mapping):
        line: InlineTable = tomlkit.inline_table()
        for key, entry in value.items():
            line.append(key, _item(entry))
        return line
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        for entry in value:
            array.append(_item(entry))
        return array
    return value
