"""The tour, run in Chromium: what it shows, with a picture in place of each widget.

    notebooks/images/*.png      for README.md and the documentation: the tour, and the editor and
                                the dashboard, light and dark

Some minutes: the notebook runs cell by cell, as a reader would run it, and the layer is edited in
the table. `python env/notebooks.py 00` does that and keeps the outputs.
"""

import base64
import io
import shutil
import time
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from PIL import Image

PICTURES = Path(__file__).resolve().parent.parent / "notebooks" / "images"
WIDGETS = {"editor": ".wb-editor", "train": ".wb-dashboard"}  # by the cell that shows them
WIDGET = "application/vnd.jupyter.widget-view+json"
PATIENCE_MS = 600_000
COLORS = 128  # of a picture: enough for charts, and a third of the bytes
# Late enough for the change of plan to be seen, early enough for the run to go on.
MOMENT = "() => +(document.querySelector('.wb-dashboard')?.dataset.done ?? 0) >= 55"
PREDICTED = """(before) => {
  const { version, pending } = document.querySelector('.wb-editor').dataset;
  return +version > +before && pending === 'false';
}"""
FAILED = "[data-mime-type='application/vnd.jupyter.stderr']"
RAN = (
    r"(n) => /\[\d+\]/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[n].innerText)"
)


class PictureError(Exception):
    """Chromium is missing, or a cell failed in it."""


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with its outputs, after JupyterLab went through a copy of it.

    Raises:
        PictureError: there is no Chromium, or a cell failed.
    """
    from tests.browser import browser, chromium, lab

    if chromium() is None:
        raise PictureError(
            "the tour runs in Chromium; install it (Debian: apt-get install chromium)"
        )
    with (
        lab(folder) as server,
        browser(viewport={"width": 1280, "height": 860}, device_scale_factor=1.5) as context,
    ):
        copy = Path(shutil.copy(path, folder))
        live = b""
        page = server.open(context, path.name)
        page.set_default_timeout(PATIENCE_MS)
        page.keyboard.press("Control+B")  # the file browser has nothing to tell
        codes = [cell.id for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        for number, cell in enumerate(codes):
            began = time.monotonic()
            _run(page, number, waits=cell != "replan")
            if cell == "editor":
                _edit(page)
            elif cell == "replan":
                dashboard = page.locator(WIDGETS["train"])
                dashboard.evaluate("e => e.scrollIntoView({block: 'end'})")  # drawn when seen
                page.wait_for_function(MOMENT)
                live = page.screenshot()
                page.wait_for_function(RAN, arg=number)
            if page.locator(FAILED).count():
                raise PictureError(f"cell {cell!r}: {page.locator(FAILED).first.inner_text()}")
            print(f"    {time.monotonic() - began:6.1f} s  {cell}", flush=True)
        page.wait_for_timeout(2000)  # widgets keep their last picture when nothing moves
        page.set_viewport_size({"width": 1280, "height": 2400})  # whole widgets
        shown = {cell: _taken(page, selector) for cell, selector in WIDGETS.items()}
        page.keyboard.press("Control+S")
        page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
        PICTURES.mkdir(exist_ok=True)
        _write("tour", live)
        for theme in ("light", "dark"):
            _turn(page, theme)
            for cell, name in (("editor", "editor"), ("train", "dashboard")):
                _write(f"{name}-{theme}", _taken(page, WIDGETS[cell]))
        ran = nbformat.read(copy, as_version=4)
    for cell in ran.cells:
        if cell.id in shown:
            _put(cell.outputs, shown[cell.id])
    return ran


def _run(page: Any, number: int, *, waits: bool) -> None:
    """Runs a code cell; each stays where it is in the notebook."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    if waits:
        page.wait_for_function(RAN, arg=number)


def _edit(page: Any) -> None:
    """Cuts the first two large layers over all engines, in the table."""
    editor = page.locator(WIDGETS["editor"])
    if (unfold := editor.get_by_role("button", name="Unfold all")).is_visible():
        unfold.click()
    for layer, scheme in (("classifier.1", "shard_out"), ("classifier.4", "shard_in")):
        before = editor.get_attribute("data-version")
        editor.get_by_label(f"scheme, {layer}", exact=True).select_option(scheme)
        page.wait_for_function(PREDICTED, arg=before)


def _taken(page: Any, selector: str) -> bytes:
    """The picture of a widget."""
    widget = page.locator(selector).first
    widget.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # until what draws only when seen has drawn
    return bytes(widget.screenshot())


def _turn(page: Any, theme: str) -> None:
    """To another theme, by the menu."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    for item in ("Theme", f"JupyterLab {theme.title()}"):
        page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()
    light = "true" if theme == "light" else "false"
    # The body has no size of its own, so that it never counts as visible.
    page.locator(f"body[data-jp-theme-light={light}]").wait_for(state="attached")


def _write(name: str, png: bytes) -> None:
    path = PICTURES / f"{name}.png"
    path.write_bytes(_small(png))
    print(f"wrote {path}, {path.stat().st_size / 1024:,.0f} KiB")


def _small(png: bytes) -> bytes:
    picture, into = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(into, "png", optimize=True)
    return into.getvalue()


def _put(outputs: list[NotebookNode], png: bytes) -> None:
    """Puts a picture in place of the widget; what the widget says in words is its text."""
    for output in outputs:
        if WIDGET in output.get("data", {}):
            words = escape(output.data["text/plain"])
            source = f"data:image/png;base64,{base64.b64encode(_small(png)).decode()}"
            image = f'<img alt="{words}" style="max-width:100%" src="{source}">'
            output.data = {"text/html": image, "text/plain": output.data["text/plain"]}
