"""Editors, and how they are shown."""

from functools import partial

import pytest

import workbench as wb
from tests.widgets.editor.shown import EditorPage


@pytest.fixture
def edit(made):
    """`edit(graph or plan, ...)` makes an editor."""
    return partial(made, wb.PlanEditor)


@pytest.fixture
def show(page, problems, edit):
    """`show(plan, target)` shows an editor of it."""

    def make(*arguments, theme="light", **options):
        shown = EditorPage(page, edit(*arguments, **options), theme)
        shown.settle()
        return shown

    return make
