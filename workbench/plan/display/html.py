"""What a notebook shows, as HTML that reads well without a kernel, as text, and as files.

All that is shown is a table, `to_frame()`, and some of it also a picture. `save` writes both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.plan.display import svg
from workbench.plan.display.markup import Markup, element
from workbench.plan.writing import save_text

if TYPE_CHECKING:
    import pandas

MOST_SHOWN = 40
"""Lines of a table that a notebook shows; the rest is counted."""

MOST_LINES = 200
"""Lines of a table that is drawn; the rest is counted."""

_SHOWN = (".svg", ".html", ".csv", ".png", ".pdf", ".jpg", ".jpeg")

_LETTER, _LINE, _GAP = 7.2, 18, 22  # pixels of a monospaced letter at 12, and between columns

_LEFT = "text-align:left"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;"
    "color:#212121;background:#fff}table{border-collapse:collapse;margin:1em 0}"
    "th,td{border-bottom:1px solid #e4e6e8;padding:.2em .8em .2em 0;vertical-align:top}"
    "pre{overflow:auto;background:#f6f7f8;padding:.8em}img,svg{max-width:100%}"
)


class Displayable(Protocol):
    """What a notebook shows."""

    def to_frame(self) -> "pandas.DataFrame":
        """Its table, in plain numbers: seconds, bytes, names."""

    def _repr_html_(self) -> Markup:
        """What a notebook shows of it."""


def save(shown: Displayable, path: str | Path, picture: Callable[[], str] | None = None) -> None:
    """Writes what a notebook shows into a file: "x.svg", "x.html" or "x.csv".

    Args:
        shown: what is shown.
        path: the file; its ending says what is written: a picture, a page, or the table.
        picture: what gives the picture, as a document; None: it is the table, drawn.

    Raises:
        OSError: the file cannot be written.
        ValueError: the name has another ending.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg":
            content = table_svg(shown.to_frame()) if picture is None else picture()
        case ".html":
            content = page(_title(shown), [shown._repr_html_()])
        case ".csv":
            frame = shown.to_frame()
            content = frame.to_csv(index=frame.index.name is not None)
        case _:
            raise ValueError(
                f"{type(shown).__name__} is saved as .svg, .html or .csv, got {path.name!r}"
            )
    save_text(path, content)


def save_value(
    value: Displayable,
    path: str | Path,
    text: Callable[[], str],
    picture: Callable[[], str] | None = None,
) -> None:
    """Writes a value's text into a file; into one for pictures, pages or tables what is shown.

    Args:
        value: the value.
        path: the file; its ending says what is written.
        text: a function that gives the text, from which the value can be read again.
        picture: a function that gives its SVG, for `save`.

    Raises:
        OSError: the file cannot be written.
        ValueError: the name has the ending of a picture of another kind.
    """
    if Path(path).suffix.lower() in _SHOWN:
        save(value, path, picture)
    else:
        save_text(Path(path), text())


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> "pandas.DataFrame":
    """A table with these columns, also where it has no rows."""
    import pandas  # only here: it takes long to load

    return pandas.DataFrame(list(rows), columns=list(columns))


def frame_html(title: str, frame: "pandas.DataFrame", what: str) -> Markup:
    """A table of pandas for a notebook, its first lines.

    Args:
        title: what it is.
        frame: the table.
        what: what its lines are, in the plural.
    """
    rows = [tuple(_cell(value) for value in row) for row in frame[:MOST_SHOWN].to_numpy().tolist()]
    told = shortened(rows, len(frame), what) if rows else rows
    return element("div", element("p", title), table(list(map(str, frame.columns)), told))


def page(title: str, parts: Iterable[Markup]) -> str:
    """A whole page to send to somebody: without scripts, and with nothing that is fetched.

    Args:
        title: its title, as text.
        parts: what it shows.
    """
    head = element("meta", charset="utf-8"), element("title", title), element("style", _STYLE)
    body = element("body", element("h1", title), *parts)
    return f"<!doctype html>{element('html', element('head', *head), body, lang='en')}\n"


def table_svg(frame: "pandas.DataFrame") -> Markup:
    """A table, drawn; a document of its own."""
    if frame.index.name is not None:
        frame = frame.reset_index()
    lines = [tuple(_cell(value) for value in row) for row in frame.itertuples(index=False)]
    head = tuple(map(str, frame.columns))
    told = [head, *lines[:MOST_LINES]]
    widths = [max(len(line[column]) for line in told) for column in range(len(head))]
    starts, x = [], 10.0
    for width in widths:
        starts.append(x)
        x += width * _LETTER + _GAP
    parts = [svg.ground()]
    for index, line in enumerate(told):
        y = (index + 1) * _LINE
        weight = 600 if index == 0 else 400
        for start, cell in zip(starts, line, strict=True):
            parts.append(svg.text(start, y, cell, fill="#212121", font_weight=weight))
    parts.append(svg.path(f"M10 {_LINE + 5}H{x - _GAP:.0f}", stroke="#9aa0a6"))
    height = (len(told) + 1) * _LINE
    if len(lines) > MOST_LINES:
        parts.append(svg.text(10, height, f"... {len(lines) - MOST_LINES:,} more", fill="#5f6368"))
        height += _LINE
    return svg.document(parts, x, height, font_family="monospace", font_size=12)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:.6g}"
    return "–" if value is None else str(value)


def _title(shown: object) -> str:
    """The first words of what it prints."""
    first = repr(shown).partition("\n")[0].strip("<>[")
    return first.partition(": ")[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Markup:
    """An HTML table in inline styles, which a notebook that is not trusted keeps, too."""
    named = [element("caption", caption)] if caption else []
    top = (element("th", name, style=_LEFT, scope="col") for name in head)
    body = (element("tr", *(element("td", cell, style=_LEFT) for cell in row)) for row in rows)
    return element("table", *named, element("thead", element("tr", *top)), element("tbody", *body))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines, in which each column is as wide as its longest cell."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]


def shortened(rows: list[tuple[str, ...]], count: int, what: str) -> list[tuple[str, ...]]:
    """The rows, and a last one that says how many more there are.

    Args:
        rows: those that are shown; the last one is added here.
        count: how many there are in all.
        what: what they are, in the plural.
    """
    if count > len(rows):
        rows.append((f"... {count - len(rows):,} more {what}", *[""] * (len(rows[0]) - 1)))
    return rows
