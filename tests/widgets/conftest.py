"""Widgets that are closed when a test ends; a page in Chromium, and what went wrong on it."""

import pytest

from tests.browser import browser
from workbench.bench.harness.browser import FrontEnd


@pytest.fixture(scope="module")
def page():
    with browser(viewport={"width": 1000, "height": 700}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        yield page


@pytest.fixture
def problems(page):
    found = []

    def on_console(message):
        if message.type == "error":
            found.append(message.text)

    def on_error(error):
        found.append(str(error))

    page.on("console", on_console)
    page.on("pageerror", on_error)
    yield found
    page.remove_listener("console", on_console)
    page.remove_listener("pageerror", on_error)
    assert found == []


@pytest.fixture
def made():
    """`made(TimingExplorer, ...)` makes one."""
    every = []

    def make(kind, *arguments, **state):
        every.append(kind(*arguments, **state))
        return every[-1]

    yield make
    for one in every:
        one.close()


@pytest.fixture
def show(page, problems, made):
    """`show(TimingExplorer, ...)` shows one."""

    def make(kind, *arguments, theme="light", **state):
        return FrontEnd(page, made(kind, *arguments, **state), theme)

    return make
