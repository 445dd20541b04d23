"""Elements of HTML and SVG as text: the one place where a tag is written.

What is no `Markup` is text, and is escaped where it is given: no name, file or error can break out.
"""

from collections.abc import Iterable
from html import escape

# In HTML these have no end; in SVG those have one in their beginning.
_VOID = {"br": ">", "img": ">", "meta": ">", "rect": "/>", "circle": "/>", "path": "/>"}


class Markup(str):
    """What `element` and `joined` have made. To be made nowhere else but in this folder."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """One element.

    Args:
        tag: its name.
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
    """What is shown once its title is clicked on.

    Args:
        title: the title: text, or a `summary` element.
        body: what is folded up.
        is_open: whether it is shown at first.
    """
    summary = title if isinstance(title, Markup) else element("summary", title)
    shown: dict[str, str] = {"open": ""} if is_open else {}
    return element("details", summary, body, **shown)
