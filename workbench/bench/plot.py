"""Bar charts with ranges, as an SVG picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.display import svg
from workbench.plan.io.html import Markup

INK, FAINT, GROUND, OURS, THEIRS = "#212121", "#5f6368", "#f1f3f4", "#1a73e8", "#9aa0a6"
LABELS, BARS, VALUES, PITCH, TOP = 230, 380, 170, 24, 34


@dataclass(frozen=True)
class Bar:
    """One measured value.

    Attributes:
        label: the name of the value.
        median: the length of the bar.
        low: the lower end of the range.
        high: the upper end of the range.
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
        title: the title, with the unit.
        bars: the bars, from top to bottom.
        target: a value to be marked, or None.
    """

    title: str
    bars: tuple[Bar, ...]
    target: float | None = None


def charts_svg(charts: Sequence[Chart]) -> str:
    """All charts, one below the other."""
    width, y = LABELS + BARS + VALUES, 0
    parts = []
    for chart in charts:
        parts.append(svg.group(_chart(chart), transform=f"translate(0 {y})"))
        y += TOP + PITCH * len(chart.bars) + 16
    return svg.document([svg.ground(), *parts], width, y, font_size=12) + "\n"


def _chart(chart: Chart) -> list[Markup]:
    full = max((bar.high for bar in chart.bars), default=0.0)
    full = max(full, chart.target or 0.0) or 1.0
    parts = [svg.text(12, 20, chart.title, fill=INK, font_weight=600)]
    for index, bar in enumerate(chart.bars):
        y = TOP + PITCH * index
        middle = y + 8
        low, median, high = (LABELS + BARS * v / full for v in (bar.low, bar.median, bar.high))
        parts += [
            svg.text(LABELS - 10, y + 12, bar.label, "end", fill=INK),
            svg.rect(LABELS, y, BARS, 16, fill=GROUND),
            svg.rect(LABELS, y, median - LABELS, 16, fill=OURS if bar.ours else THEIRS),
            svg.path(
                f"M{low:.1f} {middle}H{high:.1f}m0 -4v8M{low:.1f} {middle - 4}v8",
                stroke=INK,
                fill="none",
            ),
            svg.text(
                LABELS + BARS + 10,
                y + 12,
                f"{bar.median:.3g} ({bar.low:.3g} .. {bar.high:.3g})",
                fill=FAINT,
            ),
        ]
    if chart.target is not None:
        x, length = LABELS + BARS * chart.target / full, PITCH * len(chart.bars)
        target = f"M{x:.1f} {TOP - 4}v{length}"
        parts.append(svg.path(target, stroke="#d93025", stroke_dasharray="4 3"))
    return parts
