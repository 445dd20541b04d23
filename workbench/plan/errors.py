"""Errors about values: what was given, where, and what would be valid."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError


class PlanError(ValueError):
    """An invalid plan: the text names the layer, what was given and what is valid."""


class ExperimentError(ValueError):
    """An experiment with a wrong field: the text names it, what was given and what is valid."""


class MachineError(ValueError):
    """A machine with a wrong field, or an unknown one: the text says what is valid."""


@contextmanager
def readable(error: type[ValueError], what: str) -> Iterator[None]:
    """Turns pydantic's report into one short line for each wrong field.

    Raises:
        ValueError: pydantic's validation fails; it is of the given type.
    """
    try:
        yield
    except ValidationError as report:
        lines = []
        for item in report.errors():
            place = ".".join(str(part) for part in item["loc"]) or what
            given = "" if item["type"] == "missing" else f" (got {_short(item['input'])})"
            lines.append(f"{place}: {item['msg'].removeprefix('Value error, ')}{given}")
        raise error(f"{what}: " + "; ".join(lines)) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
