"""The values of a notebook that a magic is about."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def named(names: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """Values of a kind, by the names that the notebook gave them; IPython's own left out."""
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, kind) and not name.startswith("_")
    }


def the_only(names: Mapping[str, Any], kind: type[T], what: str, remedy: str) -> T:
    """The one value of a kind.

    Args:
        names: the notebook's.
        kind: of the value.
        what: "cluster", for the error.
        remedy: what to do where there is none.

    Raises:
        LookupError: there is none, or several.
    """
    found = named(names, kind)
    different = {id(value): name for name, value in found.items()}
    if len(different) == 1:
        return next(iter(found.values()))
    if not found:
        raise LookupError(f"this notebook has no {what}: {remedy}")
    several = ", ".join(sorted(found))
    raise LookupError(f"this notebook has more than one {what} ({several}): keep one, by del")
