"""Tables for people, that read well without a kernel."""

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Inline styles only: what a notebook that is not trusted keeps."""
    style = "style='text-align:left'"
    top = "".join(f"<th {style} scope='col'>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
