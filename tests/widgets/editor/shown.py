"""An editor on a bare page."""

import pytest

from tests.browser import chromium
from workbench.bench.harness.browser import FrontEnd

BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]
SETTLED = "document.querySelector('.wb-editor').dataset.pending === 'false'"


class EditorPage(FrontEnd):
    """An editor on a page."""

    def settle(self) -> None:
        """Until everything that was asked for is on the page."""
        self.pass_on()
        assert self.widget.settle()
        self.until(SETTLED)

    def rows(self) -> list[str]:
        return self.page.eval_on_selector_all("tr.wb-layer", "all => all.map(e => e.dataset.name)")

    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.dataset.name ?? ''")
