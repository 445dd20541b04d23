"""Chromium without a screen, and JupyterLab to open in it."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import BrowserContext, Page

from tests import ports
from workbench.bench.harness.browser import browser as browser
from workbench.bench.harness.browser import chromium as chromium

# The notebook's own indicator says idle before there is a connection to the kernel.
IDLE = "() => document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')"
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent)"
PATIENCE_S = 300  # far more than a page needs, also on a machine that does something else
ALL_RAN = f"() => {PROMPTS}.every((text) => /\\[\\d+\\]/.test(text))"


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    url: str
    token: str

    def open(self, context: BrowserContext, notebook: str) -> Page:
        """Opens a notebook, below the server's root, and waits for its kernel."""
        page = context.new_page()
        page.goto(f"{self.url}/lab/tree/{notebook}?token={self.token}&reset")
        page.wait_for_function(IDLE, timeout=1000 * PATIENCE_S)
        return page


@contextmanager
def lab(root: Path, *, theme: str = "JupyterLab Light") -> Iterator[Lab]:
    """JupyterLab on a free port, with settings of its own, that starts in `root`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        (port,), token = ports.free(1), secrets.token_hex(8)
        _write_settings(Path(home), theme)
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": root,
            "IdentityProvider.token": token,
            "LabApp.news_url": None,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.extension_manager": "readonly",
        }
        folders = ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR")
        environment = {
            **os.environ,
            **{f"JUPYTER_{name}": f"{home}/{name.lower()}" for name in folders},
            "JUPYTERLAB_SETTINGS_DIR": f"{home}/settings",
            "JUPYTERLAB_WORKSPACES_DIR": f"{home}/workspaces",
            "IPYTHONDIR": f"{home}/ipython",
        }
        log = Path(home) / "log"
        with log.open("w") as output:
            server = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in options.items())],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, log)
            yield Lab(f"http://127.0.0.1:{port}", token)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def run_all(page: Page) -> None:
    """Starts every cell, and returns at once."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def wait_until_all_ran(page: Page, timeout_s: float) -> None:
    """Waits until every code cell has a number."""
    page.wait_for_function(ALL_RAN, timeout=1000 * timeout_s)


def _write_settings(home: Path, theme: str) -> None:
    settings = {
        "apputils-extension/notification": {"fetchNews": "false"},
        "apputils-extension/themes": {"theme": theme},
        "docmanager-extension/plugin": {"autosave": False},
        # Else cells out of sight leave the page, and a test cannot look at them.
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for plugin, values in settings.items():
        path = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)  # nothing to wait on: the server tells nobody that it is up
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
