"""A page in Chromium, and what went wrong on it."""

import pytest

from tests.browser import browser


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
