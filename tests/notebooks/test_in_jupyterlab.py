"""The first notebook in a real JupyterLab, by clicks."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import BrowserContext, Locator, Page

from tests.browser import PATIENCE_S, Lab, browser, chromium, lab, run_all, wait_until_all_ran
from tests.notebooks.running import read

FIRST = "01-first-light"
SMALL = {"MODEL": "mobilenet_v3_small", "ENGINES": 2, "TARGET": 0.0}


class Visit:
    """The first notebook, opened in JupyterLab with other parameters."""

    def __init__(
        self, context: BrowserContext, server: Lab, folder: Path, notebook: nbformat.NotebookNode
    ) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        context.on("request", self._on_request)
        nbformat.write(notebook, folder / "notebook.ipynb")
        self.page: Page = server.open(context, "notebook.ipynb")
        self.page.on("console", self._on_console)
        run_all(self.page)
        self.dashboard = self.page.locator(".wb-dashboard")

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
            self.foreign.append(request.url)

    def wait_for(self, condition: str, timeout_s: float) -> None:
        """Waits until `condition` is true of the dashboard's data attributes, `d`."""
        script = (
            "() => { const d = document.querySelector('.wb-dashboard')?.dataset;"
            f" return d && ({condition}); }}"
        )
        self.page.wait_for_function(script, timeout=1000 * timeout_s)

    def figure(self, name: str) -> int:
        return int(self.dashboard.get_attribute(f"data-{name}") or -1)

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_role("button", name="Stop", exact=True)

    @property
    def num_errors(self) -> int:
        """Tracebacks, and whatever else was written to stderr."""
        return self.page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count()

    def photograph(self, name: str) -> None:
        """Keeps a picture if the environment names a folder for it."""
        if folder := os.environ.get("WORKBENCH_SCREENSHOTS"):
            self.dashboard.scroll_into_view_if_needed()
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def visit(
    tmp_path: Path, no_process_is_left: None
) -> Iterator[Callable[[nbformat.NotebookNode], Visit]]:
    """Opens a notebook in JupyterLab and runs all; nothing may be fetched from elsewhere."""
    if chromium() is None:
        pytest.skip("no Chromium is installed")
    visits: list[Visit] = []
    with lab(tmp_path) as server, browser() as context:

        def make(notebook: nbformat.NotebookNode) -> Visit:
            visits.append(Visit(context, server, tmp_path, notebook))
            return visits[-1]

        yield make
        for made in visits:
            assert made.errors == []
            assert made.foreign == []


def live(visit: Visit) -> None:
    """Waits until points were added while somebody looked: nothing is drawn out of sight."""
    visit.dashboard.wait_for(state="attached", timeout=1000 * PATIENCE_S)
    visit.dashboard.evaluate("e => e.scrollIntoView({block: 'end'})")
    visit.wait_for("d.state === 'running' && +d.points >= 2", PATIENCE_S)
    first = visit.figure("points")
    visit.wait_for(f"d.state === 'running' && +d.points > {first}", PATIENCE_S)
    visit.photograph("live")


@pytest.mark.slow
def test_first_light_in_jupyterlab(visit: Callable[[nbformat.NotebookNode], Visit]) -> None:
    others = ("race", "result", "answer")  # which need no browser
    opened = visit(read(FIRST, without=others, **SMALL, STEPS=60))
    live(opened)
    # In one condition: at the run's end the notebook shows its output, and so the view, anew.
    opened.wait_for("d.state === 'finished' && +d.done === 60 && +d.points === 60", PATIENCE_S)
    assert opened.stop_button.is_disabled()
    wait_until_all_ran(opened.page, PATIENCE_S)
    assert opened.num_errors == 0
    opened.photograph("end")


@pytest.mark.slow
def test_the_stop_button_in_jupyterlab(visit: Callable[[nbformat.NotebookNode], Visit]) -> None:
    others = ("race", "result", "answer")
    opened = visit(read(FIRST, without=others, **SMALL, STEPS=10**6))
    live(opened)
    opened.stop_button.click()
    opened.wait_for("d.state === 'stopped' && +d.done >= 2", PATIENCE_S)
    assert opened.stop_button.is_disabled()
    wait_until_all_ran(opened.page, PATIENCE_S)
    assert opened.num_errors == 0
