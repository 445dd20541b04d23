"""Runs the tour in Chromium and keeps what it shows, `python env/pictures.py`.

    notebooks/00-tour.ipynb     outputs, with a picture in place of each widget: what forges render
    notebooks/images/*.png      for README.md and the documentation: the tour, and the editor and
                                the dashboard, light and dark

Needs Chromium and some minutes: the notebook runs cell by cell, as a reader would run it, and the
layer is edited in the table.
"""

import base64
import io
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00-tour.ipynb"
PICTURES = ROOT / "notebooks" / "images"
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


def main() -> None:
    """Opens JupyterLab on a copy of the notebook, goes through it, and writes what it shows."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # of the kernel, installed or not
    from tests.browser import browser, chromium, lab

    if chromium() is None:
        sys.exit(
            "the pictures are taken in Chromium; install it (Debian: apt-get install chromium)"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        lab(Path(folder)) as server,
        browser(viewport={"width": 1280, "height": 860}, device_scale_factor=1.5) as context,
    ):
        copy = Path(shutil.copy(NOTEBOOK, folder))
        live = b""
        page = server.open(context, NOTEBOOK.name)
        page.set_default_timeout(PATIENCE_MS)
        page.keyboard.press("Control+B")  # the file browser has nothing to tell
        codes = [cell.id for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
        for number, cell in enumerate(codes):
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
                sys.exit(page.locator(FAILED).first.inner_text())
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
        _keep(nbformat.read(copy, as_version=4), shown)


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


def _keep(ran: nbformat.NotebookNode, shown: dict[str, bytes]) -> None:
    """Writes the outputs into the notebook, with pictures for widgets."""
    outputs = {cell.id: cell.outputs for cell in ran.cells if cell.cell_type == "code"}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
        cell.outputs = [_still(one, shown.get(cell.id)) for one in outputs[cell.id]]
    text = nbformat.writes(notebook)
    NOTEBOOK.write_text(text + "\n", "utf-8")
    print(f"wrote {NOTEBOOK}, {len(text) / 1024:,.0f} KiB")


def _still(output: nbformat.NotebookNode, png: bytes | None) -> nbformat.NotebookNode:
    """An output as forges show it: widgets as pictures, and nothing of this host."""
    data = output.get("data", {})
    if WIDGET in data and png is not None:
        picture = base64.b64encode(_small(png)).decode()
        text = _of_any_host(data["text/plain"])
        return nbformat.v4.new_output("display_data", {"image/png": picture, "text/plain": text})
    data.pop(WIDGET, None)
    for kind, text in data.items():
        if kind.startswith("text/"):
            data[kind] = _of_any_host(text)
    if "text" in output:
        output.text = _of_any_host(output.text)
    if "execution_count" in output:
        output.execution_count = None
    return output


def _of_any_host(text: str) -> str:
    """The text with another name for this host; ends the program where it names a folder."""
    for folder in (ROOT, Path.home(), tempfile.gettempdir()):
        if f"{folder}{os.sep}" in text:
            sys.exit(f"an output names a folder of this host: {text[:2000]}")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "localhost", text)


if __name__ == "__main__":
    main()
