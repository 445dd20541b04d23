"""A headless Chromium as the front end of a widget.

A bare page shows a widget's JavaScript half, and messages are passed between it and Python.
"""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from workbench.widgets.base.widget import Widget

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page


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
    """The path of the installed Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def browser(**options: Any) -> Iterator["BrowserContext"]:
    """A browser context with a fresh profile."""
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


PATIENCE_S = 10
LOOK_EVERY_S = 0.03  # at what moves on a page by itself
PLAY = """async ({esm, css, state, bytes, theme}) => {
  const variables = ['ui-font-color1', 'ui-font-color2', 'border-color2',
                     'layout-color1', 'layout-color2'];
  const themes = {
    light: ['#212121', '#616161', '#e0e0e0', '#ffffff', '#eeeeee'],
    dark: ['#ffffff', '#b4b4b4', '#424242', '#111111', '#303030'],
  };
  window.setTheme = (name) => {
    variables.forEach((key, i) => document.body.style.setProperty(`--jp-${key}`, themes[name][i]));
    document.body.style.background = 'var(--jp-layout-color1)';
    document.body.dataset.jpThemeLight = String(name === 'light');
  };
  setTheme(theme);
  const view = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  for (const key of bytes) state[key] = view(state[key]);
  const style = document.createElement('style');
  style.textContent = css;
  document.head.append(style);
  const module = await import(URL.createObjectURL(new Blob([esm], {type: 'text/javascript'})));
  const widget = await module.default();
  const handlers = {};
  // As in anywidget, `initialize` and `render` get different proxies of one model.
  const proxy = () => ({
    get: (key) => state[key],
    on: (event, handler) => (handlers[event] ??= []).push(handler),
    off: (event, handler) => handlers[event].splice(handlers[event].indexOf(handler), 1),
    send: (message) => window.sent.push(message),
  });
  window.sent = [];
  window.receive = (content, buffers) => {
    (handlers['msg:custom'] ?? []).forEach((handler) => handler(content, buffers.map(view)));
    window.last = content.runs?.[0].status ?? window.last;
  };
  await widget.initialize({model: proxy()});
  window.show = async () => {
    const el = document.createElement('div');
    document.body.append(el);
    const cleanup = await widget.render({model: proxy(), el});
    window.hide = () => { cleanup(); el.remove(); };
  };
  const began = performance.now();
  await show();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  window.firstPaint = performance.now() - began;
}"""
_OURS, _SCRIPTS = "workbench.widgets", ("_esm", "_css")


class FrontEnd:
    """Shows a widget on a page, which shows nothing else, and passes messages both ways."""

    def __init__(self, page: "Page", widget: Widget, theme: str = "light") -> None:
        self.page, self.widget = page, widget
        self.sent_bytes = 0  # to the page, without buffers
        self.messages: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        widget.send = self._send
        page.goto("about:blank")
        page.set_content("<!doctype html><title>a widget</title>")
        ours = {n for c in type(widget).__mro__ if c.__module__.startswith(_OURS) for n in vars(c)}
        own = [name for name in widget.traits(sync=True) if name in ours]
        state = {name: getattr(widget, name) for name in own if name not in _SCRIPTS}
        kept = [name for name, value in state.items() if isinstance(value, bytes)]
        shown = {name: _text(v) if name in kept else v for name, v in state.items()}
        page.evaluate(
            PLAY,
            {
                "esm": widget._esm,
                "css": widget._css,
                "state": {**shown, "_anywidget_id": "widget"},
                "bytes": kept,
                "theme": theme,
            },
        )
        self.pass_on()

    def pass_on(self, wait_s: float = 0.0) -> None:
        """Passes the page's messages to the widget, and the widget's to the page.

        Args:
            wait_s: the seconds to wait for the widget to send something. Polling instead would take
                the interpreter from the threads that send.
        """
        for message in self.page.evaluate("window.sent.splice(0)"):
            self.widget._handle_custom_msg(message, [])
        try:
            found = [self.messages.get(timeout=wait_s) if wait_s else self.messages.get_nowait()]
        except Empty:
            return
        # What comes meanwhile is for the next time.
        found += [self.messages.get_nowait() for _ in range(self.messages.qsize())]
        for text, buffers in found:
            self.sent_bytes += len(text)
            self.page.evaluate(
                "([m, b]) => receive(JSON.parse(m), b)", [text, list(map(_text, buffers))]
            )

    def _send(self, content: Any, buffers: Any = ()) -> None:
        """Serialises a message at once and on the widget's own thread, as Jupyter does."""
        self.messages.put((json.dumps(content, allow_nan=False), buffers))

    def until(
        self, condition: str, argument: Any = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Passes messages until a condition holds in the page.

        Raises:
            TimeoutError: the condition never held.
        """
        deadline = time.monotonic() + patience_s
        self.pass_on()
        while not self.page.evaluate(condition, argument):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page never came to: {condition}")
            self.pass_on(LOOK_EVERY_S)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
