"""Editors that are closed when a test ends."""

import pytest

import workbench as wb
from tests.widgets.editor.shown import Shown


@pytest.fixture
def edit():
    """`edit(graph or plan, ...)` makes an editor."""
    made = []

    def make(*arguments, **options):
        made.append(wb.PlanEditor(*arguments, **options))
        return made[-1]

    yield make
    for editor in made:
        editor.close()


@pytest.fixture
def show(page, problems, edit):
    """`show(plan, target)` shows an editor of it."""

    def make(*arguments, theme="light", **options):
        shown = Shown(page, edit(*arguments, **options), theme)
        shown.settle()
        return shown

    return make
