"""Ideas of a person's own: what all kinds have in common, and where installed ones are found.

An extension is an object of a class that extends one of the public base classes. It is given where
the name of a built-in one is: the object itself, "module:attribute" of it or of its class, or the
name under which an installed package offers it as an entry point of the group
`workbench.algorithms`, `workbench.codecs`, `workbench.data`, `workbench.rules`, `workbench.schemes`
or `workbench.strategies`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

from workbench.plan.extension.user_object import Own, OwnObjectError, taken
from workbench.plan.io.errors import alike, perhaps


class Extension:
    """What all kinds of extensions have.

    Attributes:
        kind: the kind, in the plural: that of its base class.
        name: what it is called in tables and errors; by default its class's name.
    """

    kind: ClassVar[str] = ""
    name: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__


@dataclass(frozen=True)
class Check:
    """What an extension was checked for, and what came of it.

    Attributes:
        what: what must hold.
        ok: whether it does.
        said: how it was tried; where it does not hold, the first case in which it does not.
    """

    what: str
    ok: bool
    said: str


def installed(kind: str) -> Mapping[str, Own]:
    """The extensions of a kind that installed packages offer, by name."""
    return {point.name: Own(name=point.value) for point in entry_points(group=f"workbench.{kind}")}


def extension_of(own: Own, kind: str) -> Any:
    """The extension itself; of a class, an object of it."""
    found = own.loaded
    if isinstance(found, type):
        found = _object_of(found, str(own))
    if not isinstance(found, Extension) or found.kind != kind:
        raise OwnObjectError(f"{own} is none of the {kind}: it does not extend their base class")
    return found


def _object_of(found: type, name: str) -> Any:
    try:
        return found()
    except Exception as error:  # whatever its own code raises
        raise OwnObjectError(
            f"{name} is a class of which no object can be made without arguments: "
            f"{type(error).__name__}: {error}; give an object of it"
        ) from error


def name_of(given: str | Own) -> str:
    """What a built-in one, or one of a person's own, is called in tables and errors."""
    if isinstance(given, str):
        return given
    name = given.held.name if isinstance(given.held, Extension) else given.name
    return name.rpartition(":")[2].rpartition(".")[2]


def named(given: object, kind: str, names: Sequence[str], what: str = "") -> object:
    """The name of a built-in one, or the `Own` of an extension.

    Args:
        given: a name, in any case, "module:attribute", an extension or its class, or an entry of a
            text.
        what: one of them, for the error; "": it says the kind.
    """
    if given is None or isinstance(given, Own):
        return given
    if isinstance(given, str) and ":" not in given:
        if given in names:
            return given
        others = installed(kind)
        there = (*names, *others)
        known = given if given in others else alike(given, there)
        if known is None:
            said = f"no {what} {given!r}" if what else f"none of the {kind} is called {given!r}"
            valid = ", ".join(map(repr, there))
            raise ValueError(f"{said}; there are {valid}{perhaps(given, there)}")
        return known if known in names else others[known].marked(given)
    if isinstance(given, type) and issubclass(given, Extension):
        given = _object_of(given, given.__name__)
    own = taken(given)
    if isinstance(own, Own) and own.held is not None:
        extension_of(own, kind)
    return own
