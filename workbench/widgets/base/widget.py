"""What all widgets have in common: bundled scripts, and a picture for where no kernel runs."""

import threading
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import ipywidgets
import traitlets
from IPython.display import DisplayHandle, display

from workbench.plan import svg
from workbench.plan.html import save

if TYPE_CHECKING:
    import pandas

BUNDLE = Path(__file__).parent.parent / "bundle"
REST_S = 1.0


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

    def still(self) -> str:
        """The last state as HTML without scripts, which untrusted notebooks show, too."""
        raise NotImplementedError

    def to_frame(self) -> "pandas.DataFrame":
        """What it shows, as a table in plain numbers."""
        raise NotImplementedError

    def pictures(self) -> Sequence[str]:
        """The pictures that it shows, documents of their own; none: it shows a table."""
        return ()

    def save(self, path: str | Path) -> None:
        """Writes what it shows now into a file: "x.svg", "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        drawn = self.pictures()
        save(self, path, partial(svg.stacked, drawn) if drawn else None)

    def _repr_html_(self) -> str:
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
