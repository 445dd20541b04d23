"""Widgets in Notebook 7, in Voila and in pages made by nbconvert; `tests/notebooks` has Lab."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from playwright.sync_api import BrowserContext, Page

from tests.browser import browser, chromium, lab, run_all

ROOT = Path(__file__).parent.parent

EDITOR = """\
import workbench as wb
from torch import nn

net = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))
graph = wb.trace(net, input_shape=(3, 4, 4))
editor = wb.PlanEditor(wb.Plan.data_parallel(graph, world_size=4), wb.Machine.preset("cpu-10gbe"))
editor"""
ASSIGN = 'editor.plan = editor.plan.with_layer("1", scheme="shard_out", group_size=4)'
# A widget of somebody else's, since Voila shows nothing that is printed after the page was made.
TELL = """\
from ipywidgets import Label

told = Label("nothing yet")
editor.observe(lambda change: setattr(told, "value", str(editor.plan.layers)), "plan")
told"""
EXPLORER = 'wb.TimingExplorer(wb.Machine.preset("cpu-10gbe"))'
# Bars lie in their lines.
TALLEST = """() => Math.max(...[...document.querySelectorAll(".wb-editor .wb-table .wb-bar")]
    .map((bar) => bar.offsetHeight))"""
INK = "e => getComputedStyle(e).color.match(/\\d+/g).slice(0, 3).map(Number)"


@pytest.fixture(autouse=True)
def kernels_import_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.fixture
def context() -> Iterator[BrowserContext]:
    """A browser for which there is this host and nothing else."""
    if chromium() is None:
        pytest.skip("no Chromium is installed")
    with browser() as context:
        context.route(re.compile(r"https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
        context.set_default_timeout(120_000)
        yield context


def written(folder: Path, *cells: str) -> nbformat.NotebookNode:
    """A notebook of these cells, in the folder as `page.ipynb`."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, folder / "page.ipynb")
    return notebook


def works(page: Page) -> None:
    """Holds that what a cell assigned is shown, and that an edit arrives in Python, and back."""
    editor = page.locator(".wb-editor")
    page.wait_for_function(
        "() => document.querySelector('[aria-label=\"scheme, 1\"]')?.value === 'shard_out'"
    )
    page.locator(".wb-explorer svg").first.wait_for()  # the last cell: all have run
    editor.get_by_label("scheme, 3", exact=True).select_option("shard_in")
    page.get_by_text("scheme='shard_in'").wait_for()
    page.wait_for_function("() => document.querySelector('.wb-editor').dataset.pending === 'false'")
    assert "scheme of 3: shard_in" in editor.locator(".wb-last").inner_text()
    assert editor.get_attribute("data-errors") == "0"
    assert page.get_by_text("Error displaying widget").count() == 0
    assert 0 < page.evaluate(TALLEST) <= 30


def is_dark(page: Page) -> bool:
    """Tells whether widgets write in light ink."""
    return all(
        min(page.locator(name).evaluate(INK)) > 128 for name in (".wb-editor", ".wb-explorer")
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("notebook") is None, reason="Notebook 7 is not installed")
def test_notebook_in_the_dark(context: BrowserContext, tmp_path: Path) -> None:
    written(tmp_path, EDITOR, ASSIGN, TELL, EXPLORER)
    with lab(tmp_path, theme="JupyterLab Dark") as server:
        page = context.new_page()
        with page.expect_websocket(lambda socket: "/channels" in socket.url) as kernel:
            page.goto(f"{server.url}/notebooks/page.ipynb?token={server.token}")
        kernel.value.wait_for_event("framereceived")  # cells that run before that are forgotten
        run_all(page)
        works(page)
        assert is_dark(page)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("voila") is None, reason="Voila is not installed")
def test_voila_in_the_light(context: BrowserContext, tmp_path: Path) -> None:
    written(tmp_path, EDITOR, ASSIGN, TELL, EXPLORER)
    with lab(tmp_path) as server:
        page = context.new_page()
        page.goto(f"{server.url}/voila/render/page.ipynb?token={server.token}&theme=light")
        works(page)
        assert not is_dark(page)


@pytest.mark.slow
def test_pages_of_nbconvert_show_the_last_picture(context: BrowserContext, tmp_path: Path) -> None:
    # Pictures follow when there is a moment's rest, and nothing rests in a program.
    notebook = written(tmp_path, EDITOR, f"{ASSIGN}\neditor.settle()\neditor.keep()", EXPLORER)
    # As JupyterLab saves it unless somebody chooses otherwise: without the widgets' state.
    NotebookClient(notebook, timeout=120, store_widget_state=False).execute()
    nbformat.write(notebook, tmp_path / "page.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "page.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    shown = page.locator(".jp-OutputArea-output").all()
    assert "shard_out" in shown[0].inner_text()  # assigned after the editor was first shown
    assert "At 8 Gbit/s and 8 workers" in shown[1].inner_text()
    for picture in page.locator(".jp-OutputArea-output img").all():
        assert picture.evaluate("e => e.complete && e.naturalWidth > 100")
    assert page.locator(".jp-OutputArea-output img").count() >= 3
