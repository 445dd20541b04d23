"""What users reach by name is there: in `wb`, in `wb.extend`, and on the pages of reference."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import workbench as wb

REFERENCE = Path(__file__).resolve().parent.parent / "notebooks" / "docs" / "pages" / "reference"
DOCUMENTED = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
)


@pytest.mark.parametrize("name", wb.__all__)
def test_every_public_name_loads(name):
    assert getattr(wb, name) is not None


@pytest.mark.parametrize("name", wb.extend.__all__)
def test_every_name_of_extensions_loads(name):
    assert getattr(wb.extend, name) is not None


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_the_reference_documents_is_there(name):
    assert resolve_name(name) is not None
