"""Charts for reports: a timing model beside what was measured, and the accuracy of several runs.

Both are pictures that any notebook shows, and say the same in words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from workbench.client.run.run import Run
from workbench.plan.display import svg
from workbench.plan.display.panels import (
    COLORS,
    FAINT,
    INK,
    RULE,
    Axis,
    Curve,
    Panel,
    document,
    line_panel,
)
from workbench.plan.experiment.sync import AnySync
from workbench.plan.io.html import Markup, element, frame_of, joined, lines, save
from workbench.plan.io.units import rate
from workbench.predict.closed_form import TimingModel, where_fastest

if TYPE_CHECKING:
    import pandas

WIDTH, HEIGHT = 700, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 684, 50, 336
_POINTS = 120

Dots = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class TimingChart:
    """A timing model on logarithmic axes, beside what was measured.

    Attributes:
        model: the timing model; its own bandwidth is put aside.
        systems: the strategies that are compared, by name.
        low: the least bandwidth, in bytes/s.
        high: the greatest bandwidth, in bytes/s.
        measured: Measured points of a system, by its name: (bandwidth, seconds of an iteration).
    """

    model: TimingModel
    systems: Mapping[str, AnySync]
    low: float
    high: float
    measured: Dots = field(default_factory=lambda: MappingProxyType({}))

    def svg(self) -> str:
        """The chart as a document of its own."""
        lines = {name: self._line(sync) for name, sync in self.systems.items()}
        every = [s for line in lines.values() for s in line]
        every += [s for dots in self.measured.values() for _, s in dots]
        bottom, top = 0.8 * min(every), 1.25 * max(every)
        parts = [*self._rate_axis(), *_seconds_axis(bottom, top)]
        legend = []
        for index, (name, line) in enumerate(lines.items()):
            color = COLORS[index % len(COLORS)]
            legend.append((color, name, ""))
            at = zip(self._rates(), line, strict=True)
            curve = svg.polyline((self._x(x), _y(s, bottom, top)) for x, s in at)
            parts.append(svg.path(curve, fill="none", stroke=color, stroke_width=2))
            for x, s in self.measured.get(name, ()):
                place = self._x(x), _y(s, bottom, top)
                parts.append(svg.circle(*place, 4.5, fill="#fff", stroke=color, stroke_width=2.5))
        title = "Seconds of an iteration by the rate of the links: model (lines), runs (circles)"
        return document([Panel(title, tuple(legend), joined(parts), WIDTH, HEIGHT)], columns=1)

    def to_frame(self) -> "pandas.DataFrame":
        """Seconds of an iteration by bandwidth (bytes/s), one column for each system."""
        lines = {name: self._line(sync) for name, sync in self.systems.items()}
        rows = (
            {"bandwidth": each, **{name: line[place] for name, line in lines.items()}}
            for place, each in enumerate(self._rates())
        )
        return frame_of(rows, ("bandwidth", *lines))

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the chart, "x.html" a page, "x.csv" the table.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    def __repr__(self) -> str:
        return "\n".join(["<TimingChart: the fastest, by the rate of the links>", *self._ranges()])

    def _repr_html_(self) -> Markup:
        picture = svg.image(self.svg(), repr(self))
        return element("div", picture, element("p", lines(self._ranges())))

    def _ranges(self) -> list[str]:
        found = where_fastest(self.model, self.systems, self.low, self.high)
        return [f"{rate(r.low)} to {rate(r.high)}: {r.name} is the fastest" for r in found]

    def _rates(self) -> list[float]:
        return list(map(float, np.geomspace(self.low, self.high, _POINTS)))

    def _line(self, sync: AnySync) -> list[float]:
        return [self.model.at(bandwidth=x).step_s(sync) for x in self._rates()]

    def _x(self, bandwidth: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(bandwidth / self.low) / math.log(
            self.high / self.low
        )

    def _rate_axis(self) -> list[Markup]:
        middle = (LEFT + RIGHT) / 2
        parts = [svg.text(middle, HEIGHT - 8, "rate of the links", "middle", fill=FAINT)]
        for bits in _decades(8 * self.low, 8 * self.high):
            x = self._x(bits / 8)
            parts.append(svg.path(f"M{x:.1f} {TOP}V{BOTTOM}", stroke=RULE))
            parts.append(svg.text(x, BOTTOM + 16, rate(bits / 8), "middle", fill=FAINT))
        return parts


def _seconds_axis(bottom: float, top: float) -> list[Markup]:
    parts = [svg.path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", fill="none", stroke=INK)]
    for seconds in _decades(bottom, top):
        y = _y(seconds, bottom, top)
        parts.append(svg.path(f"M{LEFT} {y:.1f}H{RIGHT}", stroke=RULE))
        shown = f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
        parts.append(svg.text(LEFT - 6, y + 4, shown, "end", fill=FAINT))
    return parts


def _y(seconds: float, bottom: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(seconds / bottom) / math.log(top / bottom)


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in between; the powers alone where that is many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


@dataclass(frozen=True)
class AccuracyChart:
    """What runs had learnt at each of their evaluations.

    Attributes:
        runs: runs of the same task, by name.
    """

    runs: Mapping[str, Run]

    def svg(self) -> str:
        """The chart as a document of its own."""
        curves = []
        for index, (name, run) in enumerate(self.runs.items()):
            steps, accuracies = _measured(run)
            last = f"{100 * accuracies[-1]:.1f} %" if accuracies else "–"
            color = COLORS[index % len(COLORS)]
            curves.append(Curve(name, steps, accuracies, color, last, dots=True))
        axis = Axis("test accuracy (%)", top=1.0, scale=100.0)
        return document([line_panel("Accuracy by step", curves, axis, width=860)], columns=1)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each evaluation: run, steps made, accuracy."""
        rows = (
            {"run": name, "steps": int(steps), "accuracy": accuracy}
            for name, run in self.runs.items()
            for steps, accuracy in zip(*_measured(run), strict=True)
        )
        return frame_of(rows, ("run", "steps", "accuracy"))

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the chart, "x.html" a page, "x.csv" the table.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    def __repr__(self) -> str:
        lines = ["<AccuracyChart: at the end>"]
        for name, run in self.runs.items():
            _, accuracies = _measured(run)
            lines.append(f"{name}: {accuracies[-1]:.1%}" if accuracies else f"{name}: not measured")
        return "\n".join(lines)

    def _repr_html_(self) -> Markup:
        return svg.image(self.svg(), repr(self))


def _measured(run: Run) -> tuple[list[float], list[float]]:
    """Steps made, and the accuracy after them."""
    rows = run.metrics.query("rank == 0 and accuracy == accuracy")
    return [float(step) + 1 for step in rows["step"]], list(map(float, rows["accuracy"]))
