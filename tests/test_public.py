"""What users reach by name is there: in `wb`, in `wb.extend`, and on the pages of reference."""

import builtins
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import traitlets
from IPython.core.interactiveshell import InteractiveShell

import workbench as wb

REFERENCE = Path(__file__).resolve().parent.parent / "notebooks" / "docs" / "pages" / "reference"
DOCUMENTED = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
)


def test_every_public_name_loads():
    for where in (wb, wb.extend):
        assert not [name for name in where.__all__ if getattr(where, name) is None]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("name", ["predict", "program", "search", "balanced", "SGD"])
def test_a_question_mark_tells_what_it_takes_and_does(shell, name):
    shell.user_ns["wb"] = wb
    told = shell.object_inspect_mime(f"wb.{name}")["text/plain"]
    assert f"wb.{name}(" in told
    assert inspect.getdoc(getattr(wb, name)).splitlines()[0] in told
    assert "no docstring" not in told
    assert "ValidationError" not in told, "pydantic's own words"


def test_a_folder_of_a_function_s_name_does_not_take_its_place():
    wb.predict = sys.modules["workbench.predict"]
    wb.program = sys.modules["workbench.program"]
    assert inspect.isfunction(wb.predict)
    assert inspect.isfunction(wb.program)


def callables() -> Iterator[tuple[str, object]]:
    """What people call: functions, and classes with their public methods."""
    for name in wb.__all__:
        thing = getattr(wb, name)
        yield name, thing
        if isinstance(thing, type):
            ours = [cls for cls in thing.__mro__ if cls.__module__.startswith("workbench.")]
            public = sorted({each for cls in ours for each in vars(cls) if each[:1] != "_"})
            yield from ((f"{name}.{each}", getattr(thing, each)) for each in public)


def test_no_signature_shows_how_arguments_are_checked():
    found = []
    for name, thing in callables():
        try:
            signature = str(inspect.signature(thing))
        except (TypeError, ValueError):  # not called, or of C
            continue
        found += [name] if "Annotated" in signature else []
    assert not found, f"in the signatures of {', '.join(found)}"


def test_an_error_that_is_documented_can_be_caught_by_its_name():
    missing = set()
    for name, thing in callables():
        raises = (inspect.getdoc(thing) or "").partition("Raises:\n")[2].partition("\n\n")[0]
        for entry in re.findall(r"^    (\w[\w, ]*): ", raises, re.MULTILINE):
            missing |= {
                f"{error} of {name}"
                for error in entry.split(", ")
                if not any(hasattr(where, error) for where in (wb, builtins, traitlets))
            }
    assert not missing, f"not in wb: {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    "name",
    [
        *("Comparison", "Device", "Environment", "Jobs", "Layer", "Link", "Memory", "Ranks"),
        *("Replan", "RunComparison", "Timeline", "Traffic"),
    ],
)
def test_what_people_are_given_has_a_name(name):
    """For annotations and `isinstance`."""
    assert name in wb.__all__
    assert getattr(wb, name).__name__ == name


def test_what_the_reference_documents_is_there():
    assert not [name for name in DOCUMENTED if resolve_name(name) is None]
