"""A bare page that shows a widget's browser half, with the kernel's half played by the test."""

import base64
import json
import time
from typing import Any

from playwright.sync_api import Page, TimeoutError

from workbench.widgets.dashboard import Dashboard

PATIENCE_S = 10
PLAY = """async ({esm, css, state, theme}) => {
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
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  for (const key of ['_points', '_ranks']) state[key] = bytes(state[key]);
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
    (handlers['msg:custom'] ?? []).forEach((handler) => handler(content, buffers.map(bytes)));
    window.last = content.status;
  };
  await widget.initialize({model: proxy()});
  window.show = async () => {
    const el = document.createElement('div');
    document.body.append(el);
    const cleanup = await widget.render({model: proxy(), el});
    window.hide = () => { cleanup(); el.remove(); };
  };
  await show();
}"""


class Stage:
    """One dashboard on a page: what it sends goes to the page, and back."""

    def __init__(self, page: Page, dashboard: Dashboard, messages: list[Any], theme: str) -> None:
        self.page, self.dashboard, self.messages = page, dashboard, messages
        page.goto("about:blank")
        traits = {name: getattr(dashboard, name) for name in ("_points", "_ranks", "_status")}
        state = {k: _text(v) if isinstance(v, bytes) else v for k, v in traits.items()}
        state["_anywidget_id"] = "dashboard"
        page.evaluate(
            PLAY,
            {"esm": dashboard._esm, "css": dashboard._css, "state": state, "theme": theme},
        )
        self.pass_on()

    def pass_on(self) -> None:
        """Takes what the page sent to the dashboard, and what that sent to the page."""
        for message in self.page.evaluate("window.sent.splice(0)"):
            self.dashboard._handle_custom_msg(message, [])
        while self.messages:
            content, buffers = self.messages.pop(0)
            content = json.loads(json.dumps(content, allow_nan=False))
            self.page.evaluate("([m, b]) => receive(m, b)", [content, list(map(_text, buffers))])

    def wait_for_message(self, **status: Any) -> None:
        """Passes on messages until one whose status has these values went."""
        arrived = "([wanted]) => Object.entries(wanted).every(([k, v]) => window.last?.[k] === v)"
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(arrived, [status]):
            assert time.monotonic() < deadline
            self.pass_on()

    def drawn(self, **data: str) -> None:
        """Passes on messages until the view says that it has drawn these."""
        where = "".join(f'[data-{name}="{value}"]' for name, value in data.items())
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.pass_on()
            try:
                self.page.wait_for_selector(f".wb-dashboard{where}", timeout=50)
                return
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
