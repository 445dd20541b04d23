"""Values as TOML that a person can read and edit."""

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import InlineTable, Table


def dump(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Two levels of tables, then one line for each entry: nested values stand in the line.

    A list of mappings becomes a multi-line array with one mapping on each line.
    """
    document = tomlkit.document()
    for name, entries in tables.items():
        table: Table = tomlkit.table()
        for key, value in entries.items():
            rows = isinstance(value, list | tuple) and value and isinstance(value[0], Mapping)
            table.add(key, _item(value).multiline(True) if rows else _item(value))
        document.add(name, table)
    return tomlkit.dumps(document)


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
