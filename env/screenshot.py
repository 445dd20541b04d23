"""Takes the README's picture, `python env/screenshot.py`: the first notebook while it trains.

Needs Chromium, and some minutes: the notebook runs as a reader would run it. Writes
notebooks/images/first-light.png.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01-first-light.ipynb"
PICTURE = ROOT / "notebooks" / "images" / "first-light.png"
# Late enough for a curve to see, early enough for the run to go on.
MOMENT = "() => +(document.querySelector('.wb-dashboard')?.dataset.done ?? 0) >= 62"
FAILED = "[data-mime-type='application/vnd.jupyter.stderr']"


def main() -> None:
    """Opens JupyterLab on a copy of the notebook, runs it, and waits for the moment."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # of the kernel, installed or not
    from tests.browser import browser, chromium, lab, run_all

    if chromium() is None:
        sys.exit("the picture is taken in Chromium; install it (Debian: apt-get install chromium)")
    size = {"width": 1280, "height": 800}
    with (
        tempfile.TemporaryDirectory() as folder,
        lab(Path(folder)) as server,
        browser(viewport=size, device_scale_factor=2) as context,
    ):
        shutil.copy(NOTEBOOK, folder)
        page = server.open(context, NOTEBOOK.name)
        page.keyboard.press("Control+B")  # the file browser has nothing to tell
        run_all(page)
        page.locator(f".wb-dashboard, {FAILED}").first.wait_for(state="attached", timeout=600_000)
        if page.locator(FAILED).count():
            sys.exit(page.locator(FAILED).first.inner_text())
        dashboard = page.locator(".wb-dashboard")
        dashboard.evaluate("e => e.scrollIntoView({block: 'end'})")  # it draws only when seen
        page.wait_for_function(MOMENT, timeout=600_000)
        dashboard.evaluate("e => e.scrollIntoView({block: 'end'})")  # it has grown since
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
        print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
