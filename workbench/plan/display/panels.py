"""Charts as SVG text: for pictures that need neither a browser's script nor a plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.display import svg
from workbench.plan.io.html import Markup, joined

INK, FAINT, RULE = "#212121", "#5f6368", "#e4e6e8"
# Okabe and Ito's palette: told apart by every kind of color vision.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#212121", "#9aa0a6")


@dataclass(frozen=True)
class Curve:
    """One line of a chart; a NaN is a gap.

    Attributes:
        label: its name in the legend, "" for none there; `now` is the value printed beside it.
        axis: the vertical axis that it belongs to, "left" or "right".
        fill: whether the ground below it is colored.
        dots: whether each point is marked, and gaps are joined over: for values measured now and
            then.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    now: str = ""
    axis: str = "left"
    dots: bool = False
    fill: bool = False


@dataclass(frozen=True)
class Axis:
    """A vertical axis: label with unit, top (None: that of the data), factor of its ticks."""

    label: str
    top: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: consecutive parts, the text at its end, perhaps a mark."""

    label: str
    parts: tuple[float, ...]
    text: str
    mark: float = math.nan


@dataclass(frozen=True)
class Panel:
    """A titled piece of a picture, drawn in its own coordinates."""

    title: str
    legend: tuple[tuple[str, str, str], ...]  # (color, label, value)
    body: Markup
    width: int
    height: int


def line_panel(
    title: str, curves: Sequence[Curve], left: Axis, right: Axis | None = None, *, width: int = 470
) -> Panel:
    """Curves over the step."""
    height, x0, y0 = 220, 58, 50
    x1, y1 = width - (54 if right else 16), height - 36
    last = max((x for curve in curves for x in curve.xs), default=1.0)
    first = min((x for curve in curves for x in curve.xs), default=0.0)
    span = max(last - first, 1.0)
    tops = {"left": _top(curves, "left", left), "right": _top(curves, "right", right)}
    parts = [svg.text((x0 + x1) / 2, height - 4, "step", "middle", fill=FAINT)]
    for value in ticks(first, first + span, 5):
        if value == int(value):
            x = x0 + (value - first) / span * (x1 - x0)
            parts.append(svg.text(x, y1 + 16, f"{value:,.0f}", "middle", fill=FAINT))
    for axis, side in ((left, "left"), (right, "right")):
        if axis is None:
            continue
        x, anchor, turn = (x0 - 6, "end", 12) if side == "left" else (x1 + 6, "start", width - 4)
        for value in ticks(0, tops[side] * axis.scale, 3):
            y = y1 - value / axis.scale / tops[side] * (y1 - y0)
            if side == "left":
                parts.append(svg.path(f"M{x0} {y:.1f}H{x1}", stroke=RULE))
            parts.append(svg.text(x, y + 4, digits_short(value), anchor, fill=FAINT))
        parts.append(svg.upwards(turn, (y0 + y1) / 2, axis.label, fill=FAINT))
    for curve in curves:
        at = [
            (x0 + (x - first) / span * (x1 - x0), y1 - y / tops[curve.axis] * (y1 - y0))
            for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        known = [point for point in at if math.isfinite(point[1])]
        gaps = [point if math.isfinite(point[1]) else None for point in at]
        line, look = svg.polyline(known if curve.dots else gaps), {"stroke": curve.color}
        if curve.fill and line:
            below = f"{line}L{at[-1][0]:.1f} {y1}L{at[0][0]:.1f} {y1}Z"
            parts.append(svg.path(below, fill=curve.color, opacity=0.12))
        parts.append(svg.path(line, fill="none", **look, stroke_width=1.8, stroke_linejoin="round"))
        if curve.dots and len(known) <= 40:
            parts += [svg.circle(x, y, 3, fill="#fff", **look, stroke_width=2) for x, y in known]
    legend = tuple((curve.color, curve.label, curve.now) for curve in curves if curve.label)
    return Panel(title, legend, joined(parts), width, height)


def bar_panel(
    title: str,
    bars: Sequence[Bar],
    parts: Sequence[tuple[str, str, str]],
    *,
    most: int = 8,
    width: int = 470,
) -> Panel:
    """Horizontal bars under one scale; of more than `most` bars the rest is counted.

    `parts` are (color, label, value for the legend) of a bar's parts in order, and then of its
    mark where bars have one.
    """
    x0, x1, y, pitch = 64, width - 136, 50, 20
    full = max((_extent(bar) for bar in bars), default=0.0) or 1.0
    drawn = []
    for bar in bars[:most]:
        drawn.append(svg.text(x0 - 8, y + 12, bar.label, "end", fill=INK))
        drawn.append(svg.rect(x0, y, x1 - x0, 15, fill="#f1f3f4"))
        x = float(x0)
        for value, (color, _, _) in zip(bar.parts, parts, strict=False):
            length = value / full * (x1 - x0) if math.isfinite(value) else 0.0
            drawn.append(svg.rect(x, y, length, 15, fill=color))
            x += length
        if math.isfinite(bar.mark):
            at, color = x0 + bar.mark / full * (x1 - x0), parts[-1][0]
            drawn.append(svg.path(f"M{at:.1f} {y - 2}v19", stroke=color, stroke_width=2))
        drawn.append(svg.text(x1 + 8, y + 12, bar.text, "start", fill=INK))
        y += pitch
    if len(bars) > most:
        drawn.append(
            svg.text(x0, y + 12, f"and {len(bars) - most} more ranks", "start", fill=FAINT)
        )
        y += pitch
    return Panel(title, tuple(parts), joined(drawn), width, y + 8)


def document(panels: Sequence[Panel], *, columns: int = 2, gap: int = 14) -> Markup:
    """A whole SVG document: panels in rows, on a white ground that suits any theme."""
    width, y = max(panel.width for panel in panels), gap
    parts = []
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        height = max(panel.height for panel in row)
        for column, panel in enumerate(row):
            x = gap + column * (width + gap)
            parts.append(svg.group([_frame(panel, height)], transform=f"translate({x} {y})"))
        y += height + gap
    whole = columns * (width + gap) + gap
    return svg.document([svg.ground(rx=6, fill="#fff"), *parts], whole, y)


def ticks(low: float, high: float, count: int) -> list[float]:
    """`count` or some more round values in [low, high]: multiples of 1, 2 or 5 times 10^n."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    pace = max(factor * power for factor in (1, 2, 5) if factor * power <= rough)
    first = math.ceil(low / pace - 1e-9)
    return [i * pace for i in range(first, math.floor(high / pace + 1e-9) + 1)]


def digits_short(value: float) -> str:
    """A tick's text: no trailing zeros."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _top(curves: Sequence[Curve], axis: str, wanted: Axis | None) -> float:
    if wanted is not None and wanted.top is not None:
        return wanted.top
    values = (y for curve in curves if curve.axis == axis for y in curve.ys if math.isfinite(y))
    return 1.06 * max(values, default=0.0) or 1.0


def _extent(bar: Bar) -> float:
    length = sum(value for value in bar.parts if math.isfinite(value))
    return max(length, bar.mark if math.isfinite(bar.mark) else 0.0)


def _frame(panel: Panel, height: int) -> Markup:
    parts = [
        svg.rect(-4, -4, panel.width + 8, height + 8, rx=5, fill="none", stroke=RULE),
        svg.text(4, 14, panel.title, font_weight=600, font_size=12.5, fill=INK),
    ]
    x = 4.0
    for color, label, value in panel.legend:
        text = f"{label} {value}".strip()
        parts.append(svg.rect(x, 24, 10, 10, rx=2, fill=color))
        parts.append(svg.text(x + 14, 33, text, "start", fill=INK))
        x += 26 + 6.3 * len(text)
    return joined([*parts, panel.body])
