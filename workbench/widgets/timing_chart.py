"""Seconds of an iteration by the network's bandwidth: closed forms as lines, runs as dots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType

import numpy as np

from workbench.plan.sync import Sync
from workbench.predict.timing import TimingModel, where_fastest
from workbench.widgets.charts import FAINT, INK, RULE, Panel, document, image

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#212121", "#9aa0a6")
WIDTH, HEIGHT = 700, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 684, 50, 336
_POINTS = 120

Dots = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class TimingChart:
    """A timing model on logarithmic axes, beside what was measured.

    Attributes:
        model: its own bandwidth is put aside.
        systems: strategies by name.
        low: of the bandwidths, in bytes/s.
        high: of the bandwidths, in bytes/s.
        measured: of a system's name, (bandwidth, seconds of an iteration).
    """

    model: TimingModel
    systems: Mapping[str, Sync]
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
            colour = COLOURS[index % len(COLOURS)]
            legend.append((colour, name, ""))
            at = zip(self._rates(), line, strict=True)
            points = [(self._x(rate), _y(s, bottom, top)) for rate, s in at]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [
                f'<circle cx="{self._x(rate):.1f}" cy="{_y(s, bottom, top):.1f}" r="4.5" '
                f'fill="#fff" stroke="{colour}" stroke-width="2.5"/>'
                for rate, s in self.measured.get(name, ())
            ]
        title = "Seconds of an iteration by the rate of the links: model (lines), runs (circles)"
        return document([Panel(title, tuple(legend), "".join(parts), WIDTH, HEIGHT)], columns=1)

    def __repr__(self) -> str:
        return "\n".join(["<TimingChart: the fastest, by the rate of the links>", *self._ranges()])

    def _repr_html_(self) -> str:
        return f"{image(self.svg(), repr(self))}<p>{'<br>'.join(map(escape, self._ranges()))}</p>"

    def _ranges(self) -> list[str]:
        found = where_fastest(self.model, self.systems, self.low, self.high)
        return [f"{_rate(r.low)} to {_rate(r.high)}: {r.name} is the fastest" for r in found]

    def _rates(self) -> list[float]:
        return list(map(float, np.geomspace(self.low, self.high, _POINTS)))

    def _line(self, sync: Sync) -> list[float]:
        return [self.model.at(bandwidth=rate).step_s(sync) for rate in self._rates()]

    def _x(self, rate: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(rate / self.low) / math.log(self.high / self.low)

    def _rate_axis(self) -> list[str]:
        parts = [_label((LEFT + RIGHT) / 2, HEIGHT - 8, "rate of the links", "middle")]
        for bits in _decades(8 * self.low, 8 * self.high):
            x = self._x(bits / 8)
            parts.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{RULE}"/>')
            parts.append(_label(x, BOTTOM + 16, _rate(bits / 8), "middle"))
        return parts


def _seconds_axis(bottom: float, top: float) -> list[str]:
    parts = [f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{INK}"/>']
    for seconds in _decades(bottom, top):
        y = _y(seconds, bottom, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{RULE}"/>')
        shown = f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
        parts.append(_label(LEFT - 6, y + 4, shown, "end"))
    return parts


def _y(seconds: float, bottom: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(seconds / bottom) / math.log(top / bottom)


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in between; the powers alone where that is many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


def _rate(bandwidth: float) -> str:
    bits = 8 * bandwidth
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{FAINT}">'
        f"{escape(words)}</text>"
    )
