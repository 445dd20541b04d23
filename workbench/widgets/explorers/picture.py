"""What an explorer shows, as values: panels with drawings, and the same as a table."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A line of a legend.

    Attributes:
        label: what it is.
        colour: a name in `colours.COLOURS`.
        value: beside it, as text.
        dash: of its stroke, as SVG has it; "": a whole line, or an area.
    """

    label: str
    colour: str
    value: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """A drawing.

    Attributes:
        title: above it.
        svg: a whole document; its colours are custom properties with the light theme's behind.
        alt: what it shows, in words.
        legend: below the title.
        note: beside the title.
        wide: whether it takes a whole row.
    """

    title: str
    svg: str
    alt: str
    legend: tuple[Entry, ...] = ()
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
        title: of the whole.
        said: in a few sentences, what the drawings show.
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
