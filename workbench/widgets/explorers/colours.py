"""Colours of pictures that are drawn once and shown in any theme.

Each is a custom property of `theme.css` with the light theme's value behind it, for where a
picture stands alone: in a saved notebook, or a file.
"""

from collections.abc import Mapping
from types import MappingProxyType

COLOURS: Mapping[str, str] = MappingProxyType(
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
"""Okabe and Ito's palette, told apart by every kind of colour vision, and what is not data."""

SERIES = ("blue", "vermilion", "green", "orange", "purple", "sky", "ink", "gray")
"""Of the lines of a chart, in their order."""


def paint(name: str) -> str:
    """A colour as CSS has it: `var(--wb-blue, #0072b2)`."""
    return f"var(--wb-{name}, {COLOURS[name]})"
