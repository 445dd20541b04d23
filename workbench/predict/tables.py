"""Tables for people, as text and as HTML."""

from collections.abc import Sequence
from html import escape


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of one width."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without classes or scripts."""
    top = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def shortened(rows: list[tuple[str, ...]], count: int, what: str) -> list[tuple[str, ...]]:
    """With a last line that says how many more there are."""
    if count > len(rows):
        rows.append((f"... {count - len(rows)} more {what}", *[""] * (len(rows[0]) - 1)))
    return rows
