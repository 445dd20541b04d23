"""SVG as text: every picture that the library draws is written here.

A picture is a document of elements, each a string. Looks (`fill`, `stroke_width`, `style`, ...) are
keyword arguments with "_" for "-". Text is escaped where it is given, so no name can break out.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def rect(
    x: float, y: float, width: float, height: float, title: str = "", **look: str | float
) -> str:
    """A rectangle; `title` is shown while the pointer is over it."""
    return (
        f'<rect x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
        + _closed("rect", title, look)
    )


def circle(x: float, y: float, radius: float, title: str = "", **look: str | float) -> str:
    """A circle around (x, y)."""
    return f'<circle cx="{_short(x)}" cy="{_short(y)}" r="{radius:g}"' + _closed(
        "circle", title, look
    )


def path(d: str, title: str = "", **look: str | float) -> str:
    """Lines, as SVG's path data describe them."""
    return f'<path d="{d}"' + _closed("path", title, look)


def text(x: float, y: float, words: str, anchor: str = "start", **look: str | float) -> str:
    """Words on a line; `anchor` is "start", "middle" or "end"."""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_short(x)}" y="{_short(y)}"{placed}{_written(look)}>{escape(words)}</text>'


def upwards(x: float, y: float, words: str, **look: str | float) -> str:
    """Words that run upwards, with their middle at (x, y): beside a vertical axis."""
    turned = f'transform="translate({_short(x)} {_short(y)}) rotate(-90)" text-anchor="middle"'
    return f"<text {turned}{_written(look)}>{escape(words)}</text>"


def group(parts: Iterable[str], **look: str | float) -> str:
    """Elements that share a place, a role or a look."""
    return f"<g{_written(look)}>{''.join(parts)}</g>"


def polyline(points: Iterable[tuple[float, float] | None]) -> str:
    """Path data through points; None is a gap."""
    steps, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        steps.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return "".join(steps)


def legend(
    colors: Iterable[tuple[str, str]], x: float, y: float, pitch: float, **look: str
) -> list[str]:
    """Squares with words beside them, in a row.

    Args:
        colors: the words of each entry, and its color.
        x: where the first square begins.
        y: the line that the words stand on.
        pitch: from one square to the next.
        look: how the words look.
    """
    parts = []
    for index, (words, color) in enumerate(colors):
        at = x + pitch * index
        parts.append(rect(at, y - 9, 10, 10, fill=color))
        parts.append(text(at + 14, y, words, **look))
    return parts


def document(parts: Iterable[str], width: float, height: float, **look: str | float) -> str:
    """A whole picture.

    Args:
        parts: its elements, the lowest first: a `ground`, or nothing but what it lies on.
        width: in pixels, before it is scaled.
        height: likewise.
        look: attributes of the picture, such as the font's; `FONT` at 11.5 pixels unless told.
    """
    look = {"font_family": FONT, "font_size": 11.5, **look}
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}"{_written(look)}>{"".join(parts)}</svg>'
    )


def stacked(documents: Sequence[str], gap: int = 14) -> str:
    """Whole pictures below each other, as one.

    Raises:
        ValueError: a picture has no viewBox.
    """
    parts, y, widest = list[str](), float(gap), 0.0
    for each in documents:
        found = _BOX.search(each)
        if found is None:
            raise ValueError("a picture has no viewBox")
        width, height = float(found[1]), float(found[2])
        inner = re.sub(r"^<svg ", f'<svg x="{gap}" y="{_short(y)}" ', _sized(each, width, height))
        parts.append(inner)
        y += height + gap
        widest = max(widest, width)
    return document([ground(), *parts], widest + 2 * gap, y)


_BOX = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')


def _sized(picture: str, width: float, height: float) -> str:
    """A picture with its size in pixels, also where it says none."""
    head, _, rest = picture.partition(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return f'{head} width="{width:g}" height="{height:g}">{rest}'


def ground(**look: str | float) -> str:
    """What lies below a whole picture: white unless told."""
    return f'<rect width="100%" height="100%"{_written(look or {"fill": "#fff"})}/>'


def image(svg: str, description: str, style: str = "max-width:100%") -> str:
    """An `<img>` that holds a picture; unlike inline SVG it is shown in untrusted notebooks."""
    content = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{escape(description)}" style="{style}" '
        f'src="data:image/svg+xml;base64,{content}">'
    )


def _closed(tag: str, title: str, look: Mapping[str, str | float]) -> str:
    """The end of an element: its look, and its title inside it."""
    end = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
    return _written(look) + end


def _written(look: Mapping[str, str | float]) -> str:
    """Attributes, the values of which are escaped."""
    return "".join(
        f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in look.items()
    )


def _short(value: float) -> str:
    """A hundredth of a pixel is enough; whole numbers have no point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value != int(value) else f"{value:.0f}"
