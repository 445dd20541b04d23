"""Line charts on linear or logarithmic axes, as SVG that takes the theme's colors where shown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.plan.display import svg
from workbench.plan.display.panels import ticks
from workbench.plan.io.html import Markup, joined
from workbench.widgets.drawing import theme

WIDTH, HEIGHT = 470, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 10, 44
STRIP = 7  # of bands, below the axis
_FEW = 4  # decades, up to which 2 and 5 are marked too


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        label: what is on the axis, with the unit where `text` has none.
        text: how a value reads.
        log: whether equal ratios are equally long.
        base: base of the marks of a logarithmic axis: 10 or 2.
    """

    label: str
    text: Callable[[float], str]
    log: bool = True
    base: int = 10

    def marks(self, low: float, high: float, most: int = 7) -> list[float]:
        """Round values from `low` to `high`, about as many as there is room for."""
        if not self.log:
            return ticks(low, high, most - 2)
        first, last = (math.log(value, self.base) for value in (low, high))
        powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
        if self.base == 10 and len(powers) < _FEW:
            wider = range(math.floor(first), math.ceil(last) + 1)
            every = [f * 10.0**p for p in wider for f in (1, 2, 5)]
            found = [v for v in every if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        else:
            found = [float(self.base) ** p for p in powers]
        return found[:: max(1, -(-len(found) // most))]


@dataclass(frozen=True)
class Line:
    """A curve: points that are not finite are gaps."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    dash: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A value of the x axis that is pointed at, with words above."""

    x: float
    text: str
    color: str = "ink"
    dash: str = ""


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis in one color, below the curves."""

    low: float
    high: float
    color: str
    text: str


def plot(
    lines: Sequence[Line],
    x: Scale,
    y: Scale,
    *,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
    bounds: tuple[float, float] | None = None,
    top: float | None = None,
) -> Markup:
    """A whole SVG document.

    Args:
        lines: the curves; without any finite point only the axes are drawn.
        x: the horizontal axis.
        y: the vertical axis; a linear one begins at 0.
        marks: values of the horizontal axis that are pointed at.
        bands: stretches of the horizontal axis that are colored.
        bounds: first and last value of the horizontal axis; None: those of the lines.
        top: last value of the vertical axis, beyond which curves are cut; None: the lines' own.
    """
    frame = _Frame(lines, x, y, bounds, top)
    parts = [*frame.axes(), *map(frame.band, bands)]
    parts += [part for line in lines for part in frame.line(line)]
    parts += [frame.mark(mark, index) for index, mark in enumerate(marks)]
    return theme.document(parts, WIDTH, HEIGHT)


class _Frame:
    """Where values are in a chart."""

    def __init__(
        self,
        lines: Sequence[Line],
        x: Scale,
        y: Scale,
        bounds: tuple[float, float] | None,
        top: float | None,
    ) -> None:
        self.x, self.y = x, y
        found = [value for line in lines for value in line.xs] or [1.0, 10.0]
        self.low, self.high = bounds or (min(found), max(found))
        ys = [v for line in lines for v in line.ys if math.isfinite(v) and (v > 0 or not y.log)]
        ys = [v for v in ys if top is None or v <= top] or [1.0, 10.0]
        if y.log:
            self.bottom, self.top = min(ys) / 1.3, (top or max(ys) * 1.3)
        else:
            self.bottom, self.top = min(0.0, *ys), (top or 1.06 * max(ys) or 1.0)

    def across(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _part(value, self.low, self.high, self.x.log)

    def up(self, value: float) -> float:
        length = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - length * _part(value, self.bottom, self.top, self.y.log)

    def axes(self) -> list[Markup]:
        rule, ink = theme.style(stroke="rule"), theme.style(fill="none", stroke="faint")
        right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = [theme.text((LEFT + right) / 2, HEIGHT - 5, self.x.label, "middle")]
        for value in self.x.marks(self.low, self.high):
            at = self.across(value)
            parts.append(svg.path(f"M{at:.1f} {TOP}V{floor}", style=rule))
            parts.append(theme.text(at, floor + STRIP + 14, self.x.text(value), "middle"))
        for value in self.y.marks(self.bottom, self.top, 6):
            at = self.up(value)
            parts.append(svg.path(f"M{LEFT} {at:.1f}H{right}", style=rule))
            parts.append(theme.text(LEFT - 6, at + 4, self.y.text(value), "end"))
        middle = (TOP + floor) / 2
        parts.append(svg.upwards(11, middle, self.y.label, style=theme.style(fill="faint")))
        parts.append(svg.path(f"M{LEFT} {TOP}V{floor}H{right}", style=ink))
        return parts

    def line(self, line: Line) -> list[Markup]:
        points: list[tuple[float, float] | None] = []
        dots = []
        for value, height in zip(line.xs, line.ys, strict=True):
            if not math.isfinite(height) or height > self.top or (self.y.log and height <= 0):
                points.append(None)
                continue
            x, y = self.across(value), self.up(height)
            points.append((x, y))
            if line.dots:
                said = f"{line.label}: {self.y.text(height)} at {self.x.text(value)}"
                dots.append(svg.circle(x, y, 3, said, style=theme.style(fill=line.color)))
        look = theme.style(
            fill="none", stroke_width=2, stroke=line.color, stroke_dasharray=line.dash
        )
        return [svg.path(svg.polyline(points), line.label, style=look), *dots]

    def band(self, band: Band) -> Markup:
        left, right = (self.across(v) for v in (band.low, band.high))
        look = theme.style(fill=band.color)
        return svg.rect(left, HEIGHT - BOTTOM + 1, right - left, STRIP, band.text, style=look)

    def mark(self, mark: Mark, index: int) -> Markup:
        if not self.low <= mark.x <= self.high:
            return joined([])
        at = self.across(mark.x)
        anchor, shift = ("end", -5) if at > (LEFT + WIDTH) / 2 else ("start", 5)
        look = theme.style(stroke_width=1.5, stroke=mark.color, stroke_dasharray=mark.dash)
        said = theme.text(at + shift, TOP + 11 + 14 * index, mark.text, anchor, "ink")
        return joined([svg.path(f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}", style=look), said])


def _part(value: float, low: float, high: float, log: bool) -> float:
    if high <= low:
        return 0.5
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
