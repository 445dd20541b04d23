"""Bars with their ranges, as an SVG picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
INK, FAINT, GROUND, OURS, THEIRS = "#212121", "#5f6368", "#f1f3f4", "#1a73e8", "#9aa0a6"
LABELS, BARS, VALUES, PITCH, TOP = 230, 380, 170, 24, 34


@dataclass(frozen=True)
class Bar:
    """One measured value.

    Attributes:
        label: what was measured.
        median: the length of the bar.
        low: of the range.
        high: of the range.
        ours: whether it is the workbench's.
    """

    label: str
    median: float
    low: float
    high: float
    ours: bool = False


@dataclass(frozen=True)
class Chart:
    """Bars under one scale.

    Attributes:
        title: with the unit.
        bars: from top to bottom.
        target: a value to be marked, or None.
    """

    title: str
    bars: tuple[Bar, ...]
    target: float | None = None


def svg(charts: Sequence[Chart]) -> str:
    """All charts, one below the other."""
    width, y = LABELS + BARS + VALUES, 0
    parts = []
    for chart in charts:
        parts.append(f'<g transform="translate(0 {y})">{_chart(chart)}</g>')
        y += TOP + PITCH * len(chart.bars) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" font-family="{FONT}" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _chart(chart: Chart) -> str:
    full = max((bar.high for bar in chart.bars), default=0.0)
    full = max(full, chart.target or 0.0) or 1.0
    parts = [_text(12, 20, chart.title, "start", INK, "600")]
    for index, bar in enumerate(chart.bars):
        y = TOP + PITCH * index
        middle = y + 8
        low, median, high = (LABELS + BARS * v / full for v in (bar.low, bar.median, bar.high))
        parts += [
            _text(LABELS - 10, y + 12, bar.label, "end", INK),
            f'<rect x="{LABELS}" y="{y}" width="{BARS}" height="16" fill="{GROUND}"/>',
            f'<rect x="{LABELS}" y="{y}" width="{median - LABELS:.1f}" height="16" '
            f'fill="{OURS if bar.ours else THEIRS}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} '
            f'{middle - 4}v8" stroke="{INK}" fill="none"/>',
            _text(
                LABELS + BARS + 10,
                y + 12,
                f"{bar.median:.3g} ({bar.low:.3g} .. {bar.high:.3g})",
                "start",
                FAINT,
            ),
        ]
    if chart.target is not None:
        x, length = LABELS + BARS * chart.target / full, PITCH * len(chart.bars)
        parts.append(
            f'<path d="M{x:.1f} {TOP - 4}v{length}" stroke="#d93025" stroke-dasharray="4 3"/>'
        )
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, color: str, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
