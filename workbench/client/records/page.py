"""Pages to send to somebody: whole, without scripts, and with nothing that is fetched."""

from collections.abc import Iterable
from html import escape

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;"
    "color:#212121;background:#fff}table{border-collapse:collapse;margin:1em 0}"
    "th,td{border-bottom:1px solid #e4e6e8;padding:.2em .8em .2em 0;vertical-align:top}"
    "pre{overflow:auto;background:#f6f7f8;padding:.8em}img,svg{max-width:100%}"
)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: its title, as text.
        parts: what it shows, as HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )
