"""What all explorers have in common: controls that are traits, and pictures that are redrawn.

An explorer shows a `Picture`, a value: panels with drawings, and the same as a table. Where no
kernel runs it is a still one.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.plan.display import svg
from workbench.plan.io.html import Markup, element, folded, frame_of, shortened, table
from workbench.widgets.base.widget import Displayed, Live, View
from workbench.widgets.drawing.theme import COLORS
from workbench.widgets.explorers.controls import Button, Control

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class LegendEntry:
    """A line of a legend.

    Attributes:
        label: what it is.
        color: a name in `theme.COLORS`.
        value: the text beside it.
        dash: dashes of its stroke, as SVG has them; "": a whole line, or an area.
    """

    label: str
    color: str
    value: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """A drawing.

    Attributes:
        title: the text above it.
        svg: a whole document; its colors are custom properties with the light theme's behind.
        alt: what it shows, in words.
        legend: what its colors mean, below the title.
        note: the text beside the title.
        wide: whether it takes a whole row.
    """

    title: str
    svg: str
    alt: str
    legend: tuple[LegendEntry, ...] = ()
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Figures; the first column names its rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """Everything that is shown besides the controls.

    Attributes:
        title: the title of the whole.
        said: what the drawings show, in a few sentences.
        panels: the drawings.
        table: the same in figures.
        busy: what is still being computed; "": nothing.
    """

    title: str
    said: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    table: Table | None = None
    busy: str = field(default="")

    def view(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


MOST_ROWS = 80


class Drawing(Live):
    """The pictures of an explorer: what it says, its panels, and the same in figures.

    Args:
        explorer: the explorer whose pictures they are.
    """

    script = "explorer"

    def __init__(self, explorer: "Explorer") -> None:
        self._explorer = explorer
        super().__init__(explorer.guard)

    def view(self) -> View:
        """The last picture that could be drawn, and why there is no later one."""
        return self._explorer.view()

    def act(self, content: Mapping[str, Any]) -> None:
        """Picks a part of a picture.

        Raises:
            ValueError: the message is of another type.
        """
        if content["type"] != "pick":
            raise ValueError(f"there is no {content['type']!r} to do")
        self._explorer.attempt(partial(self._explorer.pick, content["name"]))

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Says above the pictures what cannot be."""
        self._explorer.refuse(reason)

    def still(self) -> Markup:
        """The same as the explorer's."""
        return self._explorer.still()

    def to_frame(self) -> "pandas.DataFrame":
        """The same as the explorer's."""
        return self._explorer.to_frame()

    def pictures(self) -> Sequence[Markup]:
        """The same as the explorer's."""
        return self._explorer.pictures()


class Explorer(Displayed, ipywidgets.VBox):  # type: ignore[misc]
    """Pictures of a model, with what it depends on under sliders.

    Every control is a trait of its name: readable, assignable and observable, and what is assigned
    is shown at once. What cannot be is refused, and the picture stays as it is.

    Attributes:
        controls: the sliders, menus and buttons, ipywidgets' own, by name.
        drawing: the pictures, a widget of their own: both can be laid out elsewhere.
        guard: the lock that is held while what is shown changes.
    """

    _begun = False

    def __init__(self, **state: Any) -> None:
        self.guard = threading.RLock()
        self.controls: dict[str, Any] = {}
        self._errors: dict[str, str] = {}
        self._last: Picture | None = None
        self._following = False
        super().__init__(**state)
        layout = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
        self._bar = ipywidgets.HBox(layout=layout)
        self.drawing = Drawing(self)
        self._begun = True
        self._follow()
        self.children = (self._bar, self.drawing)
        names = [control.name for control in self.moves() if not isinstance(control, Button)]
        self.observe(self._moved, names)

    def moves(self) -> Sequence[Control]:
        """What can be moved, in the order in which it is shown."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """What is shown at these values.

        Raises:
            ValueError: there is no such picture; the text says why, and what to do.
        """
        raise NotImplementedError

    def press(self, name: str) -> None:
        """Does what a button is for.

        Raises:
            ValueError: there is no such button.
        """
        raise ValueError(f"there is no button {name!r}")

    def pick(self, name: str) -> None:
        """Does what is done when a part of a picture is chosen: nothing."""

    @property
    def errors(self) -> Mapping[str, str]:
        """What was refused last: "" is why there is no picture, "moved" what could not be moved."""
        with self.guard:
            return dict(self._errors)

    def view(self) -> View:
        """The last picture that could be drawn, as JSON can hold it."""
        try:
            self._last = self.picture()
            self._errors.pop("", None)
        except ValueError as error:
            self._errors[""] = str(error)
        drawn = Picture(type(self).__name__) if self._last is None else self._last
        return {"error": "\n".join(self._errors.values()), **drawn.view()}

    def attempt(self, work: Callable[[], object]) -> None:
        """Does what a person asked for, or says why it cannot be."""
        with self.guard:
            self._errors.pop("moved", None)
            try:
                work()
            except Exception as error:  # a click in vain must not be lost in a log
                self.refuse(str(error) or type(error).__name__)
            self.refresh()

    def refuse(self, reason: str) -> None:
        """Has views say why something could not be."""
        with self.guard:
            self._errors["moved"] = reason

    def refresh(self) -> None:
        """Has controls and pictures show what is the case now."""
        with self.guard:
            self._follow()
            self.drawing.refresh()

    def still(self) -> Markup:
        """The pictures and their tables, as HTML without scripts."""
        with self.guard:
            values = [
                f"{control.label}: {control.told(getattr(self, control.name))}"
                for control in self.moves()
                if not isinstance(control, Button)
            ]
            return still_html(self.drawing.shown, values)

    def to_frame(self) -> "pandas.DataFrame":
        """Its figures, as they are shown; empty where nothing can be drawn."""
        return figures_frame(self.drawing.shown)

    def pictures(self) -> Sequence[Markup]:
        """Its panels."""
        with self.guard:
            return [panel["svg"] for panel in self.drawing.shown["panels"]]

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._begun:
            for widget in (*self.controls.values(), self._bar, self.drawing):
                widget.close()
        super().close()

    def __repr__(self) -> str:
        values = ", ".join(
            f"{control.name}={getattr(self, control.name)!r}"
            for control in self.moves()
            if not isinstance(control, Button)
        )
        return f"<{type(self).__name__}: {values}>"

    def _follow(self) -> None:
        """Brings the controls to the values of the traits."""
        self._following = True
        shown = []
        for control in self.moves():
            if control.name not in self.controls:
                self.controls[control.name] = self._made(control)
            widget = self.controls[control.name]
            value = None if isinstance(control, Button) else getattr(self, control.name)
            control.show(widget, value)
            shown.append(widget)
        if self._bar.children != tuple(shown):
            self._bar.children = tuple(shown)
        self._following = False

    def _made(self, control: Control) -> Any:
        widget = control.widget()
        if isinstance(control, Button):
            widget.on_click(lambda _: self.attempt(partial(self.press, control.name)))
        else:
            widget.observe(partial(self._set, control.name), "value")
        return widget

    def _set(self, name: str, change: Mapping[str, Any]) -> None:
        """Takes over what a person moved a control to."""
        if not self._following:
            control = next(each for each in self.moves() if each.name == name)
            self.attempt(partial(setattr, self, name, control.value(change["owner"])))

    def _moved(self, change: Mapping[str, Any]) -> None:
        with self.guard:
            self.refresh()
            self.keep_soon()


def still_html(view: Mapping[str, Any], values: Sequence[str]) -> Markup:
    """What a view shows, and the values of its controls, in HTML that any notebook shows."""
    parts = [element("p", element("b", view["title"]))]
    if values:
        parts.append(element("p", "; ".join(values)))
    if view["error"]:
        parts.append(element("p", view["error"]))
    parts += [element("p", said) for said in view["said"]]
    for panel in view["panels"]:
        parts.append(element("p", panel["title"], *_legend(panel)))
        parts.append(svg.image(panel["svg"], panel["alt"]))
    if figures := view["table"]:
        rows = shortened(list(figures["rows"][:MOST_ROWS]), len(figures["rows"]), "rows")
        told = table(figures["head"], rows, figures["caption"])
        parts.append(folded("In figures", told))
    return element("div", *parts)


def figures_frame(view: Mapping[str, Any]) -> "pandas.DataFrame":
    """The figures of a view."""
    figures = view["table"]
    if figures is None:
        return frame_of([], ())
    head = figures["head"]
    return frame_of((dict(zip(head, row, strict=True)) for row in figures["rows"]), head)


def _legend(panel: Mapping[str, Any]) -> list[str]:
    parts = list[str]()
    for entry in panel["legend"]:
        square = element("span", "■", style=f"color:{COLORS[entry['color']]}")
        parts += [" ", square, f" {entry['label']} {entry['value']}".rstrip()]
    return parts
