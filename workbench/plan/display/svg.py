"""SVG as text: every picture that the library draws is written here.

A picture is a document of elements. Looks (`fill`, `stroke_width`, `style`, ...) are keyword
arguments with "_" for "-".
"""

import base64
import re
from collections.abc import Iterable, Sequence

from workbench.plan.io.html import Markup, element

_NAMES = "http://www.w3.org/2000/svg"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def rect(
    x: float, y: float, width: float, height: float, title: str = "", **look: str | float
) -> Markup:
    """A rectangle; `title` is shown while the pointer is over it."""
    box = {"x": _short(x), "y": _short(y), "width": _short(width), "height": _short(height)}
    return element("rect", *_titled(title), **box, **look)


def circle(x: float, y: float, radius: float, title: str = "", **look: str | float) -> Markup:
    """A circle around (x, y)."""
    place = {"cx": _short(x), "cy": _short(y), "r": f"{radius:g}"}
    return element("circle", *_titled(title), **place, **look)


def path(d: str, title: str = "", **look: str | float) -> Markup:
    """Lines, as SVG's path data describe them."""
    return element("path", *_titled(title), d=d, **look)


def text(x: float, y: float, words: str, anchor: str = "start", **look: str | float) -> Markup:
    """Words on a line; `anchor` is "start", "middle" or "end"."""
    place = {"x": _short(x), "y": _short(y)}
    if anchor != "start":
        place["text_anchor"] = anchor
    return element("text", str(words), **place, **look)


def upwards(x: float, y: float, words: str, **look: str | float) -> Markup:
    """Words that run upwards, with their middle at (x, y): beside a vertical axis."""
    turned = f"translate({_short(x)} {_short(y)}) rotate(-90)"
    return element("text", words, transform=turned, text_anchor="middle", **look)


def group(parts: Iterable[Markup], **look: str | float) -> Markup:
    """Elements that share a place, a role or a look."""
    return element("g", *parts, **look)


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
) -> list[Markup]:
    """Squares with words beside them, in a row."""
    parts = []
    for index, (words, color) in enumerate(colors):
        at = x + pitch * index
        parts.append(rect(at, y - 9, 10, 10, fill=color))
        parts.append(text(at + 14, y, words, **look))
    return parts


def document(parts: Iterable[Markup], width: float, height: float, **look: str | float) -> Markup:
    """A whole picture.

    Args:
        parts: its elements, the lowest first: a `ground`, or nothing but what it lies on.
    """
    size = {"width": f"{width:g}", "height": f"{height:g}"}
    size = {"xmlns": _NAMES, "viewBox": f"0 0 {width:g} {height:g}", **size}
    return element("svg", *parts, **size, **{"font_family": FONT, "font_size": 11.5, **look})


def stacked(documents: Sequence[Markup], gap: int = 14) -> Markup:
    """Whole pictures below each other, as one."""
    parts, y, widest = list[Markup](), float(gap), 0.0
    for each in documents:
        found = _BOX.search(each)
        if found is None:
            raise ValueError("a picture has no viewBox")
        width, height = float(found[1]), float(found[2])
        inner = re.sub(r"^<svg ", f'<svg x="{gap}" y="{_short(y)}" ', _sized(each, width, height))
        parts.append(Markup(inner))
        y += height + gap
        widest = max(widest, width)
    return document([ground(), *parts], widest + 2 * gap, y)


_BOX = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')


def _sized(picture: str, width: float, height: float) -> str:
    """A picture with its size in pixels, also where it says none."""
    head, _, rest = picture.partition(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return f'{head} width="{width:g}" height="{height:g}">{rest}'


def ground(**look: str | float) -> Markup:
    """What lies below a whole picture: white unless told."""
    return element("rect", width="100%", height="100%", **(look or {"fill": "#fff"}))


def image(svg: str, description: str, style: str = "max-width:100%") -> Markup:
    """An `<img>` that holds a picture; unlike inline SVG it is shown in untrusted notebooks."""
    content = base64.b64encode(svg.encode()).decode()
    source = f"data:image/svg+xml;base64,{content}"
    return element("img", alt=description, style=style, src=source)


def _titled(title: str) -> tuple[Markup, ...]:
    """What is in an element with such a title."""
    return (element("title", title),) if title else ()


def _short(value: float) -> str:
    """A hundredth of a pixel is enough; whole numbers have no point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value != int(value) else f"{value:.0f}"
