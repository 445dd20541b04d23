"""What a person brings to an experiment: functions and objects of their own.

Here they are names, with the object itself where this process has it. What can be imported
anywhere is given as "module:attribute". Anything else is written to a file when the experiment is
submitted, so that its ranks can load it: `client/run/own_objects.py`.
"""

import hashlib
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr

from workbench.plan.value import Value


class Own(Value):
    """A function, class or object of the user's own."""

    name: str
    """"module:attribute", which is imported; or what it is called where it was made."""
    file: str = ""
    """Where it lies, pickled; "": it is imported, or was not submitted yet."""
    _held: Any = PrivateAttr(None)

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

    @property
    def held(self) -> Any:
        """The object, where this process has it; else None."""
        return self._held

    @property
    def is_imported(self) -> bool:
        """Whether its name says where it is imported from."""
        return self._held is None and not self.file and ":" in self.name

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


def _taken(given: object) -> object:
    if isinstance(given, Own) or given is None:
        return given
    if isinstance(given, dict) and "name" in given and given.keys() <= {"name", "file"}:
        return Own(**given)  # as text has it
    if isinstance(given, str):
        module, _, attribute = given.partition(":")
        if not (module and attribute):
            raise ValueError(
                f"{given!r} is no place to import from: give 'module:attribute', or the object"
            )
        return Own(name=given)
    return Own.of(given)


def digest_of(content: bytes) -> str:
    """What the name of an object's file ends with."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


OwnObject = Annotated[Any, BeforeValidator(_taken)]
"""An object, or "module:attribute"; the field holds an `Own`."""
