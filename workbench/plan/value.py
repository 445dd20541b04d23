"""The base class of the values that an experiment consists of, and their text as TOML."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import tomlkit
from pydantic import BaseModel as PydanticModel
from pydantic import BeforeValidator, ConfigDict
from tomlkit.items import InlineTable, Table

from workbench.plan.errors import ExperimentError, MachineError, readable


class Value(PydanticModel):
    """A frozen value that refuses unknown fields and wrong types, with one readable error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True
    )

    _refusal: ClassVar[type[ValueError]] = ExperimentError

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses a class of somebody's own: ranks get a value as text, and would not know it.

        Raises:
            TypeError: the class was not defined in this package.
        """
        super().__init_subclass__(**options)
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise TypeError(
                f"{cls.__name__} extends {cls.__mro__[1].__name__}, which is a value: ranks get "
                "its fields as text, and would run nothing that another class adds"
            )

    def __init__(self, **fields: Any) -> None:
        with readable(self._refusal, type(self).__name__):
            super().__init__(**fields)

    def __dir__(self) -> list[str]:
        """The value's own names, without pydantic's: what Tab completes."""
        inherited = set(dir(PydanticModel))
        return [name for name in super().__dir__() if name[:1] == "_" or name not in inherited]

    def replace(self, **fields: Any) -> Self:
        """A copy with other values in some fields, validated."""
        current = {name: getattr(self, name) for name in type(self).model_fields}
        current |= self.model_extra or {}
        return type(self)(**{**current, **fields})


def by_name(
    what: str,
    values: Mapping[str, type[Value]],
    also: str = "",
    refused: Mapping[str, str] = MappingProxyType({}),
) -> BeforeValidator:
    """Takes a name for the value that this name has with all defaults.

    Args:
        what: what is named, for the error.
        values: the value of each name.
        also: what is valid besides, for the error.
        refused: why there is no value of a name that people may expect, by its lower case; also
            of the `kind` in a table.
    """

    def value(given: object) -> object:
        name = given.get("kind") if isinstance(given, Mapping) else given
        if not isinstance(name, str):
            return given
        why = refused.get(name.lower())
        if why is None and (name in values or isinstance(given, Mapping)):
            return given if isinstance(given, Mapping) else values[name]()
        valid = ", ".join(map(repr, values)) + (f" and {also}" if also else "")
        because = "" if why is None else f": {why}"
        raise ValueError(f"no {what} {name!r}{because}; there are {valid}")

    return BeforeValidator(value)


class MachineValue(Value):
    """A value that is part of a machine."""

    _refusal: ClassVar[type[ValueError]] = MachineError


def dump(tables: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> str:
    """TOML of two levels of tables with one line for each entry; nested values are inline.

    A list of mappings becomes a multi-line array with one mapping on each line; at the top level,
    one table for each (`[[name]]`).
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
