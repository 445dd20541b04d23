"""Tables for people, as HTML that reads well without a kernel, and as text."""

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """An HTML table in inline styles, which a notebook that is not trusted keeps, too."""
    style = "style='text-align:left'"
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f"<th {style} scope='col'>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


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
