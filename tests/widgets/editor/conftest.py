"""Editors that are closed when a test ends."""

import pytest

import workbench as wb


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
