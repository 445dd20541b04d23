"""A page holds the style sheets of all widgets on it: what one says must not change another."""

import re
from pathlib import Path

import pytest

import workbench.widgets

FOLDER = Path(workbench.widgets.__file__).parent
ROOTS = {
    "dashboard/dashboard.css": r"\.wb-dashboard",
    "editor/editor.css": r"\.wb-editor",
    "explorers/explorer.css": r"\.wb-explorer",
    "tables/tables.css": r"\.wb-(jobs|engines)",
}


def test_every_sheet_is_held_here() -> None:
    sheets = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("[!bn]*/*.css")}
    assert sheets == set(ROOTS)


@pytest.mark.parametrize("sheet", ROOTS)
def test_every_selector_names_its_widget(sheet: str) -> None:
    text = re.sub(r"/\*.*?\*/", "", (FOLDER / sheet).read_text("utf-8"), flags=re.DOTALL)
    rules = [rule.strip() for rule in re.findall(r"([^{};]+)\{", text)]
    # A comma between parentheses parts no selectors.
    every = [one for r in rules if not r.startswith("@") for one in re.split(r",(?![^(]*\))", r)]
    assert len(every) > 20
    assert [one for one in every if not re.search(ROOTS[sheet], one)] == []
