"""The base class of the values that an experiment consists of, and their text as TOML."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel as PydanticModel
from pydantic import BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from workbench.plan.io.errors import ExperimentError, MachineError, alike, perhaps, readable
from workbench.plan.io.html import frame_of

if TYPE_CHECKING:
    import pandas

    # It has no public name.
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(PydanticModel)

_INHERITED = frozenset(dir(PydanticModel))
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class _OwnNames(ModelMetaclass):
    """Has Tab complete a class's own names, without pydantic's."""

    def __dir__(cls) -> list[str]:
        return own_names(super().__dir__())


def own_names(names: Iterable[str]) -> list[str]:
    """Those that pydantic does not bring; what begins with "_" is not shown anyway."""
    return [name for name in names if name[:1] == "_" or name not in _INHERITED]


class Value(PydanticModel, metaclass=_OwnNames):
    """A frozen value that refuses unknown fields and wrong types, with one readable error.

    Raises:
        TypeError: a field is given without its name.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True
    )

    _refusal: ClassVar[type[ValueError]] = ExperimentError

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses a class of somebody's own: ranks get a value as text, and would not know it."""
        super().__init_subclass__(**options)
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise TypeError(
                f"{cls.__name__} extends {cls.__mro__[1].__name__}, which is a value: ranks get "
                "its fields as text, and would run nothing that another class adds"
            )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Has `?` and `help` tell of the fields: their names, defaults and documentation."""
        super().__pydantic_init_subclass__(**options)
        cls.__signature__ = _signature(cls)
        if told := _told(cls):
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{told}"

    def __init__(self, /, *unnamed: Any, **fields: Any) -> None:
        """Takes the fields by name, and checks them; the class's own text describes each.

        Raises:
            TypeError: a field is given without its name.
            ValueError: a field is unknown, missing or wrong, or two exclude each other; the text
                names it. Of a machine it is a `MachineError`, else an `ExperimentError`.
        """
        cls = type(self)
        if unnamed:
            names = ", ".join(f"{name}=" for name in _signature(cls).parameters)
            raise TypeError(
                f"{cls.__name__} takes its fields by name, {names}; got {len(unnamed)} without one"
            )
        meant = {name: field.description or "" for name, field in cls.model_fields.items()}
        with readable(self._refusal, cls.__name__, meant):
            super().__init__(**fields)

    def __dir__(self) -> list[str]:
        """The value's own names, without pydantic's: what Tab completes."""
        return own_names(super().__dir__())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What `repr` tells: the fields that are not as they are without being given."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields.get(name or "")
            if field is None or not (_is_constant(field) or value == field.get_default()):
                yield name, value

    def _lines(self) -> list[tuple[str, str]]:
        """(name, value as a line of text) of the fields that `repr` tells."""
        lines = [(str(name), repr(value)) for name, value in self.__repr_args__()]
        return [(name, line.partition("\n")[0].strip("<>")) for name, line in lines]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each field that is not as it is without being given: its name and value."""
        rows = [{"field": name, "value": value} for name, value in self._lines()]
        return frame_of(rows, ("field", "value"))

    def replace(self, **fields: Any) -> Self:
        """A copy with other values in some fields, validated."""
        current = {name: getattr(self, name) for name in type(self).model_fields}
        current |= self.model_extra or {}
        return type(self)(**{**current, **fields})


def _signature(value: type[Value]) -> Signature:
    """What its class is called with: fields by name, and first what it takes without."""
    takes = inspect.signature(value.__init__).parameters.values()
    bare = {each.name for each in takes if each.kind is Parameter.VAR_POSITIONAL}
    first, rest = [], []
    for name, field in value.model_fields.items():
        if _is_constant(field):
            continue
        default = Parameter.empty if field.is_required() else field.get_default()
        if name not in bare:
            rest.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
        elif isinstance(default, tuple):
            first.append(Parameter(name, Parameter.VAR_POSITIONAL))
        else:
            first.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    if value.model_config.get("extra") == "allow":
        rest.append(Parameter("options", Parameter.VAR_KEYWORD))
    return Signature([*first, *rest])


def _is_constant(field: FieldInfo) -> bool:
    """Whether it only tells one kind of value from another: nobody sets it."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _told(value: type[Value]) -> str:
    """The documentation of the fields, as a section of a docstring."""
    lines = ["Attributes:"]
    for name, field in value.model_fields.items():
        if field.description and not _is_constant(field):
            text = " ".join(field.description.split())
            lines += textwrap.wrap(
                f"{name}: {text}", 100, initial_indent="    ", subsequent_indent="        "
            )
    return "\n".join(lines) if len(lines) > 1 else ""


def by_name(
    what: str,
    values: Mapping[str, type[Value]],
    also: str = "",
    refused: Mapping[str, str] = MappingProxyType({}),
) -> BeforeValidator:
    """Takes a name, in any case, for the value that this name has with all defaults.

    Args:
        also: what is valid besides, for the error.
        refused: why there is no value of a name that people may expect; also of the `kind` in a
            table.
    """
    valid = ", ".join(map(repr, values)) + (f" and {also}" if also else "")

    def value(given: object) -> object:
        if isinstance(given, Value):
            return given
        name = given.get("kind") if isinstance(given, Mapping) else given
        if not isinstance(name, str):
            called = getattr(given, "__name__", type(given).__name__)
            such = next(iter(values.values())).__name__
            raise ValueError(
                f"{called} is no {what} of the workbench; there are values such as wb.{such}(...), "
                f"and their names: {valid}"
            )
        why, known = refused.get(alike(name, refused) or ""), alike(name, values)
        if why is None and isinstance(given, Mapping):
            return given if known in (None, name) else {**given, "kind": known}
        if why is None and known is not None:
            return values[known]()
        because, near = ("", perhaps(name, values)) if why is None else (f": {why}", "")
        raise ValueError(f"no {what} {name!r}{because}; there are {valid}{near}")

    return BeforeValidator(value)


class MachineValue(Value):
    """A value that is part of a machine."""

    _refusal: ClassVar[type[ValueError]] = MachineError


def dump(tables: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> str:
    """TOML of two levels of tables with one line for each entry; nested values are inline.

    A list of mappings becomes a multi-line array with one mapping on each line; at the top level,
    one table for each (`[[name]]`).
    """
    parts = []
    for name, entries in tables.items():
        if isinstance(entries, Mapping):
            head, several = f"[{_key(name)}]", [entries]
        else:
            head, several = f"[[{_key(name)}]]", list(entries)
        for each in several:
            lines = [f"{_key(key)} = {_entry(value)}" for key, value in each.items()]
            parts.append("\n".join([head, *lines, ""]))
    return "\n".join(parts)


def _entry(value: Any) -> str:
    """A value behind its key; one line for each mapping in a list of them."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return "\n".join(["[", *(f"    {_inline(row)}," for row in value), "]"])
    return _inline(value)


def _inline(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_inline(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for one character that JSON leaves."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
