"""Widgets whose whole view is one value: Python makes it, browsers draw it."""

import threading
from collections.abc import Mapping
from typing import Any

import traitlets

from workbench.widgets.widget import Widget

View = dict[str, Any]
REST_S = 1.0


class Live(Widget):
    """Sends what it shows whenever that has changed, whole: it is small.

    A subclass says in `view` what is shown, as JSON can hold it, and in `act` what a person can
    ask for. Messages may come on several threads at once, and are carried out one by one. The
    view is `live.js`.
    """

    # What a view begins with; from then on it gets messages, and keeps this up to date by itself,
    # so that a saved notebook holds what was last seen.
    _view = traitlets.Dict().tag(sync=True)

    _begun = False

    def __init__(self, **state: Any) -> None:
        self._guard = threading.RLock()
        self._keeping: threading.Timer | None = None
        super().__init__(**state)
        self._begun = True
        self.on_msg(self._receive)

    def open(self) -> None:
        """Opens the way to views, which have something to show from the start."""
        self._shown = self.view()
        self._view = self._shown
        super().open()

    def view(self) -> View:
        """Everything that a view needs."""
        raise NotImplementedError

    def act(self, content: Mapping[str, Any]) -> None:
        """Does what a view asks for.

        Raises:
            ValueError: it cannot be; the text is shown.
        """
        raise NotImplementedError

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Takes note that what a view asked for cannot be."""
        raise NotImplementedError

    def refresh(self) -> bool:
        """Has all views show what is the case now; whether that is news."""
        if not self._begun:
            return False
        with self._guard:
            view = self.view()
            if view == self._shown:
                return False
            self._shown = view
            self.send({"type": "view", "view": view})
            return True

    def keep_soon(self) -> None:
        """Brings the picture in saved notebooks up to date once nothing moves for a second."""
        with self._guard:
            if self._keeping is not None:
                self._keeping.cancel()
            if self._handles:
                self._keeping = threading.Timer(REST_S, self.keep)
                self._keeping.daemon = True
                self._keeping.start()

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._begun and self._keeping is not None:
            self._keeping.cancel()
        super().close()

    def _receive(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        with self._guard:
            if content.get("type") == "hello":
                self.send({"type": "view", "view": self._shown})
            else:
                try:
                    self.act(content)
                except Exception as error:  # a click in vain must not be lost in a log
                    self.refused(content, str(error) or type(error).__name__)
                self.refresh()
            self.send({"type": "heard"})  # a view that hears nothing says so
