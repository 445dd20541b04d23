"""What a notebook shows, as HTML that reads well without a kernel, as text, and as files.

All that is shown is a table, `to_frame()`, and some of it also a picture. `save` writes both.

`element` is the one place where a tag is written. What is no `Markup` is text, and is escaped where
it is given: no name, file or error can break out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.plan.io.files import save_text

if TYPE_CHECKING:
    import pandas

# In HTML these have no end; in SVG those have one in their beginning.
_VOID = {"br": ">", "img": ">", "meta": ">", "rect": "/>", "circle": "/>", "path": "/>"}


class Markup(str):
    """What `element` and `joined` have made. To be made nowhere else but in this folder."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """One element.

    Args:
        children: what is in it: text, which is escaped, and markup.
        attributes: its attributes, which are escaped, with "_" for "-".
    """
    said = "".join(
        f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
    )
    if not children and (end := _VOID.get(tag)) is not None:
        return Markup(f"<{tag}{said}{end}")
    return Markup(f"<{tag}{said}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Text, which is escaped, and markup, one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def lines(texts: Iterable[str]) -> Markup:
    """Texts below each other."""
    return Markup(element("br").join(joined([text]) for text in texts))


def folded(title: str, body: Markup, *, is_open: bool = False) -> Markup:
    """What is shown once its title is clicked on."""
    summary = title if isinstance(title, Markup) else element("summary", title)
    shown: dict[str, str] = {"open": ""} if is_open else {}
    return element("details", summary, body, **shown)


MOST_SHOWN = 40
"""Lines of a table that a notebook shows; the rest is counted."""

_SHOWN = (".svg", ".html", ".csv", ".png", ".pdf", ".jpg", ".jpeg")

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
    """Writes what a notebook shows into a file: "x.html" or "x.csv"; a picture also as "x.svg".

    Args:
        picture: what gives the picture, as a document; None: there is none.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" if picture is not None:
            content = picture()
        case ".html":
            content = page(_title(shown), [shown._repr_html_()])
        case ".csv":
            frame = shown.to_frame()
            content = frame.to_csv(index=frame.index.name is not None)
        case _:
            valid = ".html or .csv" if picture is None else ".svg, .html or .csv"
            raise ValueError(f"{type(shown).__name__} is saved as {valid}, got {path.name!r}")
    save_text(path, content)


def save_value(
    value: Displayable,
    path: str | Path,
    text: Callable[[], str],
    picture: Callable[[], str] | None = None,
) -> None:
    """Writes a value's text into a file; into one for pictures, pages or tables what is shown.

    Args:
        text: a function that gives the text, from which the value can be read again.
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
        what: what its lines are, in the plural.
    """
    rows = [tuple(_cell(value) for value in row) for row in frame[:MOST_SHOWN].to_numpy().tolist()]
    told = shortened(rows, len(frame), what) if rows else rows
    return element("div", element("p", title), table(list(map(str, frame.columns)), told))


def page(title: str, parts: Iterable[Markup]) -> str:
    """A whole page to send to somebody: without scripts, and with nothing that is fetched."""
    head = element("meta", charset="utf-8"), element("title", title), element("style", _STYLE)
    body = element("body", element("h1", title), *parts)
    return f"<!doctype html>{element('html', element('head', *head), body, lang='en')}\n"


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
    """
    if count > len(rows):
        rows.append((f"... {count - len(rows):,} more {what}", *[""] * (len(rows[0]) - 1)))
    return rows
