"""Charts as SVG text: for pictures that need neither a browser's script nor a plotting library."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
INK, FAINT, RULE = "#212121", "#5f6368", "#e4e6e8"


@dataclass(frozen=True)
class Curve:
    """One line of a chart; a NaN is a gap.

    Attributes:
        label: its name in the legend, "" for none there; `now` is the value printed beside it.
        axis: "left" or "right".
        fill: colors the ground below it.
        dots: marks each point and joins over gaps: for values that are measured now and then.
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
    body: str
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
    parts = [text_at((x0 + x1) / 2, height - 4, "step", "middle", FAINT)]
    for value in ticks(first, first + span, 5):
        if value == int(value):
            x = x0 + (value - first) / span * (x1 - x0)
            parts.append(text_at(x, y1 + 16, f"{value:,.0f}", "middle", FAINT))
    for axis, side in ((left, "left"), (right, "right")):
        if axis is None:
            continue
        x, anchor, turn = (x0 - 6, "end", 12) if side == "left" else (x1 + 6, "start", width - 4)
        for value in ticks(0, tops[side] * axis.scale, 3):
            y = y1 - value / axis.scale / tops[side] * (y1 - y0)
            if side == "left":
                parts.append(f'<path d="M{x0} {y:.1f}H{x1}" stroke="{RULE}"/>')
            parts.append(text_at(x, y + 4, digits_short(value), anchor, FAINT))
        middle = (y0 + y1) / 2
        parts.append(
            f'<text x="{turn}" y="{middle}" transform="rotate(-90 {turn} {middle})" '
            f'text-anchor="middle" fill="{FAINT}">{escape(axis.label)}</text>'
        )
    for curve in curves:
        at = [
            (x0 + (x - first) / span * (x1 - x0), y1 - y / tops[curve.axis] * (y1 - y0))
            for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        line = _path(at, over_gaps=curve.dots)
        if curve.fill and line:
            parts.append(
                f'<path d="{line}L{at[-1][0]:.1f} {y1}L{at[0][0]:.1f} {y1}Z" fill="{curve.color}" '
                'opacity="0.12"/>'
            )
        parts.append(
            f'<path d="{line}" fill="none" stroke="{curve.color}" stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
        if curve.dots and sum(map(math.isfinite, curve.ys)) <= 40:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#fff" stroke="{curve.color}" '
                'stroke-width="2"/>'
                for x, y in at
                if math.isfinite(y)
            ]
    legend = tuple((curve.color, curve.label, curve.now) for curve in curves if curve.label)
    return Panel(title, legend, "".join(parts), width, height)


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
        drawn.append(text_at(x0 - 8, y + 12, bar.label, "end", INK))
        drawn.append(f'<rect x="{x0}" y="{y}" width="{x1 - x0}" height="15" fill="#f1f3f4"/>')
        x = float(x0)
        for value, (color, _, _) in zip(bar.parts, parts, strict=False):
            length = value / full * (x1 - x0) if math.isfinite(value) else 0.0
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="15" fill="{color}"/>'
            )
            x += length
        if math.isfinite(bar.mark):
            at, color = x0 + bar.mark / full * (x1 - x0), parts[-1][0]
            drawn.append(f'<path d="M{at:.1f} {y - 2}v19" stroke="{color}" stroke-width="2"/>')
        drawn.append(text_at(x1 + 8, y + 12, bar.text, "start", INK))
        y += pitch
    if len(bars) > most:
        drawn.append(text_at(x0, y + 12, f"and {len(bars) - most} more ranks", "start", FAINT))
        y += pitch
    return Panel(title, tuple(parts), "".join(drawn), width, y + 8)


def document(panels: Sequence[Panel], *, columns: int = 2, gap: int = 14) -> str:
    """A whole SVG document: panels in rows, on a white ground that suits any theme."""
    width, y = max(panel.width for panel in panels), gap
    parts = []
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        height = max(panel.height for panel in row)
        for column, panel in enumerate(row):
            x = gap + column * (width + gap)
            parts.append(f'<g transform="translate({x} {y})">{_frame(panel, height)}</g>')
        y += height + gap
    whole = columns * (width + gap) + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {y}" '
        f'width="{whole}" height="{y}" font-family="{FONT}" font-size="11.5">'
        f'<rect width="100%" height="100%" rx="6" fill="#fff"/>{"".join(parts)}</svg>'
    )


def image(svg: str, description: str) -> str:
    """An `<img>` that holds `svg`; unlike inline SVG it is shown in untrusted notebooks."""
    content = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{escape(description)}" style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{content}">'
    )


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


def _path(points: Sequence[tuple[float, float]], *, over_gaps: bool) -> str:
    steps, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            steps.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        elif not over_gaps:
            pen = "M"
    return "".join(steps)


def _frame(panel: Panel, height: int) -> str:
    parts = [
        f'<rect x="-4" y="-4" width="{panel.width + 8}" height="{height + 8}" rx="5" '
        f'fill="none" stroke="{RULE}"/>',
        f'<text x="4" y="14" font-weight="600" font-size="12.5" fill="{INK}">'
        f"{escape(panel.title)}</text>",
    ]
    x = 4.0
    for color, label, value in panel.legend:
        text = f"{label} {value}".strip()
        parts.append(f'<rect x="{x:.0f}" y="24" width="10" height="10" rx="2" fill="{color}"/>')
        parts.append(text_at(x + 14, 33, text, "start", INK))
        x += 26 + 6.0 * len(text)
    return "".join(parts) + panel.body


def text_at(x: float, y: float, text: str, anchor: str, color: str) -> str:
    """Words; `anchor` is "start", "middle" or "end"."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )
