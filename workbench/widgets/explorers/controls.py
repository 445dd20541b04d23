"""What a person can move in an explorer: ipywidgets' sliders, menus and buttons for its traits.

An explorer declares what can be moved, and how values read; the widgets are ipywidgets' own, so
that `observe`, `jslink` and `HBox` work with them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ipywidgets

STEPS_PER_DECADE = 20
_STYLE = {"description_width": "150px"}
_LAYOUT = {"width": "430px", "max_width": "100%"}


class Control(Protocol):
    """One thing to move; its name is that of a trait."""

    @property
    def name(self) -> str:
        """The trait's name."""

    @property
    def label(self) -> str:
        """The trait's name for people."""

    def widget(self) -> Any:
        """A new widget for it, an ipywidgets one."""

    def show(self, widget: Any, value: Any) -> None:
        """Brings a widget to a value of the trait."""

    def value(self, widget: Any) -> Any:
        """The value of the trait that a widget is at."""

    def told(self, value: Any) -> str:
        """How a value reads."""


@dataclass(frozen=True)
class Slider:
    """A number between two others, by equal steps: in a range, or in any ascending values.

    Attributes:
        name: the name of its trait.
        label: its name for people.
        values: the values that it can be moved to, ascending.
        told: how a value reads.
    """

    name: str
    label: str
    values: Sequence[float]
    told: Callable[[Any], str]

    def widget(self) -> Any:
        """An `IntSlider` for a range, else a `SelectionSlider`, which shows how values read."""
        options: dict[str, Any] = {"description": self.label, "style": _STYLE, "layout": _LAYOUT}
        if isinstance(self.values, range):
            return ipywidgets.IntSlider(self.values[0], self.values[0], self.values[-1], **options)
        return ipywidgets.SelectionSlider(options=self._options(self.values), **options)

    def show(self, widget: Any, value: Any) -> None:
        """At the value itself, which becomes one of the slider's where it was none."""
        if isinstance(self.values, range):
            widget.max = max(self.values[-1], value)
            widget.value = value
            return
        values = tuple(self.values if value in self.values else sorted([*self.values, value]))
        if tuple(known for _, known in widget.options) != values:
            widget.options = self._options(values)
        widget.index = values.index(value)

    def value(self, widget: Any) -> Any:
        """The value that the slider is at."""
        return widget.value

    def _options(self, values: Sequence[float]) -> tuple[tuple[str, float], ...]:
        return tuple((self.told(value), value) for value in values)


@dataclass(frozen=True)
class Choice:
    """One of several.

    Attributes:
        name: the name of its trait.
        label: its name for people.
        options: the values, by how they read.
    """

    name: str
    label: str
    options: Mapping[str, Any]

    def widget(self) -> Any:
        """A `Dropdown` of how values read: among its own, None would mean that none is chosen."""
        options = tuple(self.options)
        return ipywidgets.Dropdown(
            options=options, description=self.label, style=_STYLE, layout=_LAYOUT
        )

    def show(self, widget: Any, value: Any) -> None:
        """With the option that has this value."""
        options = tuple(dict.fromkeys([*self.options, self.told(value)]))
        if widget.options != options:
            widget.options = options
        widget.value = self.told(value)

    def value(self, widget: Any) -> Any:
        """The value of the option that is chosen."""
        return self.options.get(widget.value, widget.value)

    def told(self, value: Any) -> str:
        """The option that has this value."""
        return next((text for text, known in self.options.items() if known == value), str(value))


@dataclass(frozen=True)
class Button:
    """Something to do at once; its `name` is what is done, and `why_not` why it cannot be."""

    name: str
    label: str
    why_not: str = ""

    def widget(self) -> Any:
        """A `Button`."""
        return ipywidgets.Button(description=self.label, layout={"width": "auto"})

    def show(self, widget: Any, value: Any = None) -> None:
        """It can be pressed, or says why not."""
        widget.disabled, widget.tooltip = bool(self.why_not), self.why_not

    def value(self, widget: Any) -> Any:
        """None: it has no trait."""
        return None

    def told(self, value: Any) -> str:
        """Nothing: it has no value."""
        return ""


def decades(low: float, high: float, per_decade: int = STEPS_PER_DECADE) -> tuple[float, ...]:
    """Values from low to high, equally far apart on a logarithmic scale, with three digits."""
    count = round(per_decade * math.log10(high / low))
    return tuple(float(f"{low * (high / low) ** (i / count):.3g}") for i in range(count + 1))


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, ... up to high."""
    found = [low]
    while 2 * found[-1] <= high:
        found.append(2 * found[-1])
    return tuple(found)
