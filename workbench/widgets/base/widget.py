"""What all widgets have in common: bundled scripts, and a picture for where no kernel runs.

Those that are `Live` have a view that is one value: Python makes it, browsers draw it.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import ipywidgets
import traitlets
from IPython.display import DisplayHandle, display

from workbench.plan.display import svg
from workbench.plan.io.html import Markup, save

if TYPE_CHECKING:
    import pandas

BUNDLE = Path(__file__).parent.parent / "bundle"
REST_S = 1.0

View = dict[str, Any]


@cache
def asset(name: str) -> str:
    """A bundled file ("dashboard.js", "dashboard.css").

    Raises:
        FileNotFoundError: it has not been built; published wheels hold it.
    """
    path = BUNDLE / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built yet: run `python env/bundle.py` once")
    return path.read_text(encoding="utf-8")


class Displayed(ipywidgets.DOMWidget):  # type: ignore[misc]
    """A widget of which saved notebooks hold a picture, too.

    A subclass says what `still` is; `keep` brings that up to date in the notebooks that show the
    widget.
    """

    _keeping: threading.Timer | None = None

    def __init__(self, **state: Any) -> None:
        self._handles: list[DisplayHandle] = []
        super().__init__(**state)

    def still(self) -> Markup:
        """The last state as HTML without scripts, which untrusted notebooks show, too."""
        raise NotImplementedError

    def to_frame(self) -> "pandas.DataFrame":
        """What it shows, as a table in plain numbers."""
        raise NotImplementedError

    def pictures(self) -> Sequence[Markup]:
        """The pictures that it shows, documents of their own; none: it shows a table."""
        return ()

    def save(self, path: str | Path) -> None:
        """Writes what it shows now into a file: "x.svg", "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        drawn = self.pictures()
        save(self, path, partial(svg.stacked, drawn) if drawn else None)

    def _repr_html_(self) -> Markup:
        return self.still()

    def keep(self) -> None:
        """Brings the picture that saved notebooks hold up to date."""
        data, metadata = self._repr_mimebundle_()
        for handle in self._handles:
            handle.update(data, raw=True, metadata=metadata)

    def keep_soon(self) -> None:
        """Brings it up to date once nothing moves for a second."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._handles:
            self._keeping = threading.Timer(REST_S, self.keep)
            self._keeping.daemon = True
            self._keeping.start()

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._keeping is not None:
            self._keeping.cancel()
        super().close()

    def _ipython_display_(self) -> None:
        data, metadata = self._repr_mimebundle_()
        handle = display(data, raw=True, metadata=metadata, display_id=True)
        self._handles.append(handle)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = super()._repr_mimebundle_(**kwargs) or {}
        data, metadata = found if isinstance(found, tuple) else (found, {})  # as anywidget has it
        return {**data, "text/html": self.still(), "text/plain": repr(self)}, metadata


class Widget(Displayed, anywidget.AnyWidget):
    """A view in the browser with a Python half that can be read, assigned and observed.

    A subclass names its script.
    """

    script: ClassVar[str]
    """Name of its entry among the bundled scripts: "dashboard"."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    @traitlets.default("_esm")
    def _bundled_esm(self) -> str:
        return asset(f"{self.script}.js")

    @traitlets.default("_css")
    def _bundled_css(self) -> str:
        return asset(f"{self.script}.css")


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
