"""Errors about values: what was given, where, and what would be valid."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType

from pydantic import ValidationError


class PlanError(ValueError):
    """An invalid plan: the text names the layer, what was given and what is valid."""


class ExperimentError(ValueError):
    """An experiment with a wrong field: the text names it, what was given and what is valid."""


class MachineError(ValueError):
    """A machine with a wrong field, or an unknown one: the text says what is valid."""


@contextmanager
def readable(
    error: type[ValueError], what: str, meant: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Turns pydantic's report into one short line for each wrong field.

    Args:
        meant: the meaning of each field, by its name.
    """
    try:
        yield
    except ValidationError as report:
        lines = []
        for item in report.errors():
            place, said = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
            if not place:  # about several fields, which it names
                lines.append(said)
            elif item["type"] == "missing":
                words = " ".join(meant.get(place, "").split())
                lines.append(f"{place}: missing" + (f"; {words}" if words else ""))
            elif item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                lines.append(f"{place}: there is no such field; {_valid(place, meant)}")
            else:
                got = f"(got {_short(item['input'])})"
                lines.append(f"{place}: {said.removesuffix(got).rstrip()} {got}")
        raise error(f"{what}: " + "; ".join(lines)) from None


def _valid(name: str, meant: Mapping[str, str]) -> str:
    if near := get_close_matches(name, meant, n=1):
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(meant)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown(what: str, given: str, valid: Iterable[str], *, of: str = "") -> str:
    """An error's text for a name that does not exist, with the nearest that do."""
    names = sorted(valid)
    near = _nearest(given, names, most=3, cutoff=0.5)
    place = f" of {of}" if of else ""
    if near:
        return f"no {what} {given!r}{place}; did you mean {', '.join(map(repr, near))}?"
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"no {what} {given!r}{place}; there are {shown}"


def perhaps(given: str, names: Iterable[str]) -> str:
    """What an error's text ends with after all names: the nearest of them, if one is near."""
    near = _nearest(given, names, most=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def alike(given: str, names: Iterable[str]) -> str | None:
    """The one of some names that is written so in another case, or with other dashes.

    "AdamW" is "adamw", and "topk" is "top_k"; None: it is none of them.
    """
    return {_bare(name): name for name in names}.get(_bare(given))


def _nearest(given: str, names: Iterable[str], *, most: int, cutoff: float) -> list[str]:
    by_bare = {_bare(name): name for name in names}
    return [by_bare[n] for n in get_close_matches(_bare(given), by_bare, n=most, cutoff=cutoff)]


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
