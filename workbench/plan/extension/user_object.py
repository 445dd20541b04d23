"""What a person brings to an experiment: functions and objects of their own.

Here they are names, with the object itself where this process has it. What can be imported
anywhere is given as "module:attribute". Anything else is written to a file when the experiment is
submitted (`client/run/own_objects.py`), and its ranks open that file before they begin. Nobody
else opens one: what is loaded from it could do anything.

A name in a text may be anybody's. Unless the text is trusted, it is read as `Foreign`, and is not
imported.
"""

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BeforeValidator, PrivateAttr

from workbench.plan.extension.sealed import SealError, own_key, unpack
from workbench.plan.io.value import Value


class OwnObjectError(ValueError):
    """An own object that cannot be loaded in this process, or does not do what it is for."""


class Foreign(str):
    """A string from a text that is not trusted.

    Attributes:
        place: its place in the text, as "sync.algorithm".
    """

    place: str = ""


def foreign(content: Any, place: str = "") -> Any:
    """Returns a text's content with every string marked as `Foreign`."""
    if isinstance(content, dict):
        prefix = f"{place}." if place else ""
        return {key: foreign(value, prefix + key) for key, value in content.items()}
    if isinstance(content, list):
        return [foreign(value, place) for value in content]
    if not isinstance(content, str):
        return content
    said = Foreign(content)
    said.place = place
    return said


class Own(Value):
    """A function, class or object of the user's own."""

    name: str
    """"module:attribute", which is imported; or what it is called where it was made."""
    file: str = ""
    """Where it lies, pickled; "": it is imported, or was not submitted yet."""
    _held: Any = PrivateAttr(None)
    _place: str = PrivateAttr("")  # its place in a text that is not trusted

    def marked(self, name: object) -> Self:
        """Returns this, marked as not trusted if its name is `Foreign`."""
        self._place = name.place.removesuffix(".name") if isinstance(name, Foreign) else ""
        return self

    @classmethod
    def of(cls, given: object) -> Self:
        """An object of this process."""
        kind = given if hasattr(given, "__qualname__") else type(given)
        name = getattr(kind, "__qualname__", "object").replace("<locals>.", "")
        module = getattr(kind, "__module__", None)
        own = cls(name=name if module in (None, "__main__") else f"{module}.{name}")
        own._held = given
        return own

    def lying_in(self, file: str) -> "Own":
        """The same, once it is in a file."""
        own = type(self)(name=self.name, file=file)
        own._held = self._held
        return own

    def opened(self) -> "Own":
        """The same with the object of its file, which this process executes."""
        if self.is_imported:
            _ = self.loaded
        if self._held is not None or not self.file:
            return self
        own = type(self)(name=self.name, file=self.file)
        try:
            own._held = unpack(Path(self.file).read_bytes(), own_key())
        except SealError as error:
            raise OwnObjectError(f"{self.file} is not loaded: {error}") from None
        except Exception as error:  # whatever its own code raises
            raise self._cannot_be_loaded(error) from error
        return own

    @property
    def held(self) -> Any:
        """The object, where this process has it; else None."""
        return self._held

    @property
    def loaded(self) -> Any:
        """The object, imported where its name says from where.

        Raises:
            OwnObjectError: it cannot be imported, or was an object of another process.
        """
        if self._held is not None:
            return self._held
        if not self.is_imported:
            raise OwnObjectError(
                f"{self.name!r} was an object of the process that made the experiment, and is not "
                "in its text: give the object again, or 'module:attribute'"
            )
        module, _, attribute = self.trusted.name.partition(":")
        try:
            found = importlib.import_module(module)
            for name in attribute.split("."):
                found = getattr(found, name)
        except Exception as error:  # whatever its own code raises
            raise self._cannot_be_loaded(error) from error
        return found

    @property
    def trusted(self) -> Self:
        """This object, if its name may be imported.

        Raises:
            OwnObjectError: it is named in a text that is not trusted.
        """
        if self._place:
            raise OwnObjectError(
                f"{self.name!r} is named in a text, as {self._place}, and was not imported: read "
                "the text with trust=True if you trust its author, or give the object"
            )
        return self

    @property
    def is_imported(self) -> bool:
        """Whether its name says where it is imported from."""
        return self._held is None and not self.file and ":" in self.name

    @property
    def is_at_hand(self) -> bool:
        """Whether this process has the object, or may import it."""
        return self._held is not None or (self.is_imported and not self._place)

    def _cannot_be_loaded(self, error: Exception) -> OwnObjectError:
        why = f"{type(error).__name__}: {error}"
        if "__main__'" in why:
            why += ". What functools.lru_cache wraps is imported: put it into a file, and import it"
        return OwnObjectError(f"{self.name!r} cannot be loaded in this process: {why}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Own):
            return NotImplemented
        if self.file and other.file:
            return self.file == other.file
        if self._held is not None and other._held is not None:
            return self._held is other._held
        return (self.name, self.file) == (other.name, other.file)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


def taken(given: object) -> object:
    """An object, "module:attribute", or an entry of a text, for its `Own`."""
    if isinstance(given, Own) or given is None:
        return given
    if isinstance(given, dict) and "name" in given and given.keys() <= {"name", "file"}:
        return Own(**given).marked(given["name"])  # as text has it
    if isinstance(given, str):
        module, _, attribute = given.partition(":")
        if not (module and attribute):
            raise ValueError(
                f"{given!r} is no place to import from: give 'module:attribute', or the object"
            )
        return Own(name=given).marked(given)
    return Own.of(given)


def is_looked_at(count: int) -> bool:
    """Whether what a person brought is tried again with this call of it, counted from 1.

    The first calls are; later ones ever more seldom, so that a long run costs nothing more.
    """
    return count <= 16 or count.bit_count() == 1


def digest_of(content: bytes) -> str:
    """What the name of an object's file ends with."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


OwnObject = Annotated[Any, BeforeValidator(taken)]
"""An object, or "module:attribute"; the field holds an `Own`."""


def called(given: object) -> object:
    """As `taken`, for what is called."""
    own = taken(given)
    held = own.held if isinstance(own, Own) else None
    if isinstance(held, type):
        raise ValueError(f"{own} is a class: give an object of it, {held.__name__}(...)")
    if held is not None and not (callable(held) or hasattr(held, "update")):
        raise ValueError(f"{type(held).__name__} is no function")
    return own


OwnFunction = Annotated[Any, BeforeValidator(called)]
"""A function, an object that is one or keeps states, or "module:attribute"; holds an `Own`."""


@runtime_checkable
class HoldsOwn(Protocol):
    """A value of another kind that may hold own objects: a plan, in its schemes."""

    def with_own(self, change: Callable[[Own, str], Own], place: str) -> Self: ...


def mapped(value: Any, change: Callable[[Own, str], Own], place: str = "") -> Any:
    """A value with all own objects in it changed; the same one where none of them is.

    Args:
        change: (own, its place) -> what stands there instead.
    """
    if isinstance(value, Own):
        return change(value, place)
    if isinstance(value, HoldsOwn):
        return value.with_own(change, place)
    if isinstance(value, Mapping):
        entries = {name: mapped(one, change, f"{place}.{name}") for name, one in value.items()}
        return value if all(entries[name] is value[name] for name in value) else entries
    if not isinstance(value, Value):
        return value
    prefix = f"{place}." if place else ""
    fields = {name: getattr(value, name) for name in type(value).model_fields}
    new = {name: mapped(one, change, prefix + name) for name, one in fields.items()}
    changed = {name: one for name, one in new.items() if one is not fields[name]}
    return value.replace(**changed) if changed else value


def opened(value: Any) -> Any:
    """A value whose own objects are all there, from their files: on the ranks of a run."""
    return mapped(value, lambda own, _: own.opened())
