"""What a person can move in an explorer, and how values are told apart from places of a slider."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

STEPS_PER_DECADE = 20


class Control(Protocol):
    """One thing to move; its name is that of a trait."""

    @property
    def name(self) -> str:
        """Of the trait."""

    def spec(self, value: Any) -> dict[str, Any]:
        """What a view needs to show it at a value."""

    def value(self, sent: Any) -> Any:
        """The value that a view means.

        Raises:
            ValueError: none.
        """


@dataclass(frozen=True)
class Slider:
    """A number between two others, by equal steps.

    Attributes:
        name: of its trait.
        label: for people.
        values: that it can be moved to, ascending.
        text: how a value reads.
    """

    name: str
    label: str
    values: Sequence[float]
    text: Callable[[float], str]

    def spec(self, value: float) -> dict[str, Any]:
        """At the place of the nearest value; the text is of the value itself."""
        place = min(range(len(self.values)), key=lambda i: self._distance(self.values[i], value))
        return {
            "kind": "slider",
            "name": self.name,
            "label": self.label,
            "at": place,
            "most": len(self.values) - 1,
            "text": self.text(value),
        }

    def value(self, sent: Any) -> float:
        """Of a place."""
        if isinstance(sent, bool) or not isinstance(sent, int) or not 0 <= sent < len(self.values):
            raise ValueError(f"{self.label} has places 0 to {len(self.values) - 1}, got {sent!r}")
        return self.values[sent]

    def _distance(self, one: float, other: float) -> float:
        if self.values[0] > 0 and other > 0:
            return abs(math.log(one / other))
        return abs(one - other)


@dataclass(frozen=True)
class Choice:
    """One of several.

    Attributes:
        name: of its trait.
        label: for people.
        options: by how they read, the values.
    """

    name: str
    label: str
    options: Mapping[str, Any]

    def spec(self, value: Any) -> dict[str, Any]:
        """With the option that has this value."""
        chosen = next((text for text, known in self.options.items() if known == value), str(value))
        return {
            "kind": "choice",
            "name": self.name,
            "label": self.label,
            "at": chosen,
            "options": list(self.options) if chosen in self.options else [*self.options, chosen],
        }

    def value(self, sent: Any) -> Any:
        """Of an option."""
        if sent not in self.options:
            raise ValueError(f"{self.label} is one of {', '.join(self.options)}; got {sent!r}")
        return self.options[sent]


@dataclass(frozen=True)
class Button:
    """Something to do at once; its `name` is what is done, and `why_not` why it cannot be."""

    name: str
    label: str
    why_not: str = ""

    def spec(self, value: Any = None) -> dict[str, Any]:
        """The same at any time."""
        return {"kind": "button", "name": self.name, "label": self.label, "why_not": self.why_not}

    def value(self, sent: Any) -> Any:
        """None: it has no trait."""
        return None


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
