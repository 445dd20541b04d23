"""A dashboard on a bare page, with the kernel's half played by the test."""

from typing import Any

from playwright.sync_api import Page

from workbench.bench.harness.browser import FrontEnd
from workbench.widgets.dashboard import Dashboard


class Stage(FrontEnd):
    """One dashboard on a page, and what tests wait for."""

    def __init__(self, page: Page, dashboard: Dashboard, theme: str) -> None:
        super().__init__(page, dashboard, theme)

    def wait_for_message(self, **status: Any) -> None:
        """Passes on messages until one whose status has these values went."""
        arrived = "([wanted]) => Object.entries(wanted).every(([k, v]) => window.last?.[k] === v)"
        self.until(arrived, [status])

    def drawn(self, **data: str) -> None:
        """Passes on messages until the view says that it has drawn these."""
        where = "".join(f'[data-{name}="{value}"]' for name, value in data.items())
        self.until("(where) => document.querySelector(where) !== null", f".wb-dashboard{where}")
