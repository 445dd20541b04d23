"""Colors of pictures that are drawn once and shown in any theme.

Each is a custom property of `theme.css` with the light theme's value behind it, for where a
picture stands alone: in a saved notebook, or a file.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from workbench.plan.display import svg
from workbench.plan.io.html import Markup

COLORS: Mapping[str, str] = MappingProxyType(
    {
        "blue": "#0072b2",
        "vermilion": "#d55e00",
        "green": "#009e73",
        "orange": "#e69f00",
        "sky": "#56b4e9",
        "purple": "#cc79a7",
        "gray": "#9aa0a6",
        "ink": "#212121",
        "faint": "#5f6368",
        "rule": "#e0e0e0",
        "ground": "#ffffff",
        "raised": "#eeeeee",
    }
)
"""Okabe and Ito's palette, told apart by every kind of color vision, and what is not data."""

SERIES = ("blue", "vermilion", "green", "orange", "purple", "sky", "ink", "gray")
"""Colors of the lines of a chart, in their order."""


def paint(name: str) -> str:
    """A color as CSS has it: `var(--wb-blue, #0072b2)`."""
    return f"var(--wb-{name}, {COLORS[name]})"


def style(**look: str | float) -> str:
    """CSS of an element: `style(fill="blue", stroke_width=2)`; only CSS knows custom properties."""

    def written(value: str | float) -> str | float:
        return paint(value) if isinstance(value, str) and value in COLORS else value

    return ";".join(
        f"{name.replace('_', '-')}:{written(value)}" for name, value in look.items() if value != ""
    )


def text(x: float, y: float, words: str, anchor: str = "start", color: str = "faint") -> Markup:
    """Words on a line; `anchor` is "start", "middle" or "end"."""
    return svg.text(x, y, words, anchor, style=style(fill=color))


def document(parts: Iterable[Markup], width: float, height: float) -> Markup:
    """A whole picture, on the theme's ground."""
    return svg.document([svg.ground(style=style(fill="ground")), *parts], width, height)
