"""Chromium without a screen."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

FLAGS = [
    "--no-sandbox",  # in a container there is no user namespace to make one with
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """Path of the installed Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def browser(**options: Any) -> Iterator["BrowserContext"]:
    """A fresh profile of the installed browser."""
    from playwright.sync_api import sync_playwright

    viewport = options.pop("viewport", {"width": 1400, "height": 1000})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, sync_playwright() as p:
        context = p.chromium.launch_persistent_context(
            profile,
            executable_path=chromium(),
            headless=True,
            args=FLAGS,
            viewport=viewport,
            **options,
        )
        try:
            yield context
        finally:
            context.close()
