"""Widgets whose whole view is one value: Python makes it, browsers draw it."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import traitlets

from workbench.widgets.base.widget import Widget

View = dict[str, Any]


class Live(Widget):
    """Sends what it shows whenever that has changed, whole: it is small.

    A subclass says in `view` what is shown, as JSON can hold it, and in `act` what a person can
    ask for. Messages may come on several threads at once, and are carried out one by one. The
    view is `live.js`.

    Args:
        guard: the lock that is held while what is shown changes; None: one of its own.
        state: first values of the attributes.
    """

    # What a view begins with; from then on it gets messages, and keeps this up to date by itself,
    # so that a saved notebook holds what was last seen.
    _view = traitlets.Dict().tag(sync=True)

    _begun = False

    def __init__(self, guard: AbstractContextManager[Any] | None = None, **state: Any) -> None:
        self._guard = guard or threading.RLock()
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

    @property
    def shown(self) -> View:
        """What views show now."""
        return self._shown

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
