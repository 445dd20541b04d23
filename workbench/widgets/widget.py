"""What all widgets have in common: bundled scripts, and a picture for where no kernel runs."""

from typing import Any, ClassVar

import anywidget
import traitlets
from IPython.display import DisplayHandle, display

from workbench.widgets.assets import asset


class Widget(anywidget.AnyWidget):
    """A view in the browser with a Python half that can be read, assigned and observed.

    A subclass names its script and says what `still` is; `keep` brings that up to date in the
    notebooks that show the widget.
    """

    script: ClassVar[str]
    """Name of its entry among the bundled scripts: "dashboard"."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    def __init__(self, **state: Any) -> None:
        self._handles: list[DisplayHandle] = []
        super().__init__(**state)

    @traitlets.default("_esm")
    def _bundled_esm(self) -> str:
        return asset(f"{self.script}.js")

    @traitlets.default("_css")
    def _bundled_css(self) -> str:
        return asset(f"{self.script}.css")

    def still(self) -> str:
        """The last state as HTML without scripts, which untrusted notebooks show, too."""
        raise NotImplementedError

    def keep(self) -> None:
        """Brings the picture that saved notebooks hold up to date."""
        data, metadata = self._repr_mimebundle_()
        for handle in self._handles:
            handle.update(data, raw=True, metadata=metadata)

    def _ipython_display_(self) -> None:
        data, metadata = self._repr_mimebundle_()
        handle = display(data, raw=True, metadata=metadata, display_id=True)
        self._handles.append(handle)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/html": self.still(), "text/plain": repr(self)}, metadata
