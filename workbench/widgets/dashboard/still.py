"""Runs as a still picture with tables: what is left of a dashboard where no kernel runs."""

import math
from collections.abc import Mapping, Sequence

from workbench.plan.display import svg
from workbench.plan.display.panels import (
    INK,
    Axis,
    Bar,
    Curve,
    Panel,
    bar_panel,
    document,
    line_panel,
)
from workbench.plan.experiment.metrics import KINDS
from workbench.plan.io.html import Markup, element, folded, joined, table
from workbench.plan.io.units import digits, milliseconds, size
from workbench.widgets.dashboard.runs import WatchedRun, metric_of, said
from workbench.widgets.dashboard.series import CATEGORIES, RankFigures
from workbench.widgets.dashboard.timeline import RunForecast, StepTimeline

# Okabe and Ito's colors, which people with any color vision tell apart.
BLUE, SKY, VERMILION, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, GRAY, BLACK, PURPLE = "#E69F00", "#9aa0a6", "#212121", "#CC79A7"
# Of the runs that are overlaid; of memory's categories; of what spans of a step are.
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GRAY)
MEMORY = (BLUE, ORANGE, GREEN, SKY, GRAY)
SPANS = {
    "load": "#C9CDD1",
    "forward": BLUE,
    "loss": PURPLE,
    "backward": SKY,
    "collective": ORANGE,
    "wait": GRAY,
    "update": GREEN,
    "step": "#C9CDD1",
}


MOST_EVENTS = 12


def picture(
    watched: Mapping[str, WatchedRun],
    shown: str,
    forecast: RunForecast,
    timelines: tuple[StepTimeline, StepTimeline] = (StepTimeline(), StepTimeline()),
) -> Markup:
    """Panels as one SVG document: how the runs learn; memory, time and traffic of one."""
    ranks = watched[shown].series.ranks
    panels = [_learning(watched), _speed(watched, forecast), _memory(watched[shown], forecast)]
    panels.append(_clock(ranks))
    titles = ("Step as predicted", "Step as measured")
    panels += [
        lane_panel(title, each)
        for title, each in zip(titles, timelines, strict=True)
        if len(each.spans)
    ]
    return document((*panels, _links(ranks, forecast)))


def _learning(watched: Mapping[str, WatchedRun]) -> Panel:
    curves = []
    alone, metric = len(watched) == 1, metric_of(next(iter(watched.values())).run)
    for index, (name, each) in enumerate(watched.items()):
        at, color = each.series.columns, COLORS[index % len(COLORS)]
        known = _last(at["loss"])
        curves.append(
            Curve("loss" if alone else name, at["step"], at["loss"], color, digits(known))
        )
        if alone or not all(map(math.isnan, at["accuracy"])):
            curves.append(
                Curve(
                    f"test {metric}" if alone else "",
                    at["step"],
                    at["accuracy"],
                    VERMILION if alone else color,
                    said(metric, each.series.accuracy),
                    axis="right",
                    dots=True,
                )
            )
    share = metric == "accuracy"
    right = Axis("test accuracy (%)", top=1.0, scale=100.0) if share else Axis(f"test {metric}")
    return line_panel(f"Loss and {metric}", curves, Axis("loss"), right)


def _speed(watched: Mapping[str, WatchedRun], forecast: RunForecast) -> Panel:
    curves = []
    for index, (name, each) in enumerate(watched.items()):
        at, alone = each.series.columns, len(watched) == 1
        color = GREEN if alone else COLORS[index % len(COLORS)]
        now = digits(_last(at["samples_per_s"]))
        label = "samples/s" if alone else name
        curves.append(Curve(label, at["step"], at["samples_per_s"], color, now, fill=alone))
    if forecast.samples_per_s is not None:
        steps = [x for curve in curves for x in curve.xs] or [0.0]
        ends = (min(steps), max(steps))
        speed = forecast.samples_per_s
        curves.append(Curve("predicted", ends, (speed, speed), GRAY, digits(speed)))
    return line_panel("Throughput", curves, Axis("samples/s"))


def _memory(watched: WatchedRun, forecast: RunForecast) -> Panel:
    bars = []
    for rank, found in enumerate(watched.series.ranks):
        parts: tuple[float, ...] = (
            found.weight_bytes,
            found.gradient_bytes,
            found.optimizer_bytes,
            found.activation_bytes,
            found.buffer_bytes,
        )
        if math.isnan(found.weight_bytes):
            parts = (found.now_bytes,)
        predicted = math.nan
        if rank < len(forecast.ranks):
            predicted = float(forecast.ranks[rank, : len(CATEGORIES)].sum())
        bars.append(Bar(f"rank {rank}", parts, size(sum(parts)), predicted))
    names = tuple((color, name, "") for color, name in zip(MEMORY, CATEGORIES, strict=True))
    kind = "GPU memory" if any(found.on_gpu for found in watched.series.ranks) else "Tensor memory"
    most = size(max(_known([f.peak_bytes for f in watched.series.ranks]), default=math.nan))
    mark = (BLACK, "predicted", "")
    return bar_panel(f"{kind} per rank, at most {most}", bars, (*names, mark))


def _clock(ranks: Sequence[RankFigures]) -> Panel:
    times = [(f.compute_s, f.communication_s, f.wait_s) for f in ranks]
    bars = [Bar(f"rank {r}", parts, milliseconds(sum(parts))) for r, parts in enumerate(times)]
    names = ((GREEN, "compute"), (ORANGE, "communication"), (GRAY, "wait"))
    shares = tuple(
        (color, name, milliseconds(_average([parts[i] for parts in times])))
        for i, (color, name) in enumerate(names)
    )
    return bar_panel("Time of a step per rank", bars, shares)


def _links(ranks: Sequence[RankFigures], forecast: RunForecast) -> Panel:
    bars = []
    for rank, found in enumerate(ranks):
        expected = math.nan
        if rank < len(forecast.ranks) and found.step_s > 0:
            seconds = found.step_s if forecast.step_s is None else forecast.step_s
            expected = float(forecast.ranks[rank, -1]) / seconds
        text = f"{size(found.received_per_s)}/s"
        bars.append(Bar(f"rank {rank}", (found.received_per_s,), text, expected))
    most = max(_known([f.received_per_s for f in ranks]), default=math.nan)
    legend = ((SKY, "received, at most", f"{size(most)}/s"), (BLACK, "predicted", ""))
    return bar_panel("Links", bars, legend)


def lane_panel(title: str, timeline: StepTimeline, *, width: int = 470) -> Panel:
    """Two lanes of each rank, compute above communication."""
    x0, y, pitch, height = 64, 50, 11, 10
    scale = (width - x0 - 16) / (timeline.seconds or 1.0)
    drawn, found = [], set()
    first, count = timeline.ranks
    for rank in range(first, first + count):
        top = y + (rank - first) * (2 * pitch + 4)
        drawn.append(svg.text(x0 - 8, top + 14, f"rank {rank}", "end", fill=INK))
    for rank, lane, kind, _, start, seconds, _ in timeline.spans.tolist():
        top = y + (rank - first) * (2 * pitch + 4) + lane * pitch
        what = KINDS[int(kind)]
        found.add(what)
        width_of = max(seconds * scale, 0.3)
        drawn.append(svg.rect(x0 + start * scale, top, width_of, height, fill=SPANS[what]))
    legend = tuple((SPANS[what], what, "") for what in KINDS if what in found)
    step = "" if timeline.step is None else f", step {timeline.step:,}"
    title = f"{title}{step}: {milliseconds(timeline.seconds)}"
    return Panel(title, legend, joined(drawn), width, y + count * (2 * pitch + 4) + 8)


def html(
    watched: Mapping[str, WatchedRun],
    shown: str,
    forecast: RunForecast,
    timelines: tuple[StepTimeline, StepTimeline] = (StepTimeline(), StepTimeline()),
) -> Markup:
    """The picture and tables, in HTML that untrusted notebooks show too."""
    status = watched[shown].status
    named = "Run" if len(watched) == 1 else f"Run {shown}"
    error = [element("pre", status.error), element("p", status.advice)] if status.error else []
    others = [f"{name}: {each.status}" for name, each in watched.items() if name != shown]
    happened = [line.text for line in watched[shown].events.lines][-MOST_EVENTS:]
    drawn = picture(watched, shown, forecast, timelines)
    told = _table(watched[shown].series.ranks)
    return element(
        "div",
        element("p", element("b", named), f": {status}"),
        *error,
        *(element("p", other) for other in others),
        svg.image(drawn, f"Charts of the run: {status}"),
        folded("Memory, time and traffic of a step per rank", told),
        *(element("p", line) for line in happened),
    )


def _table(ranks: Sequence[RankFigures]) -> Markup:
    headers = ("rank", "memory now", "peak", "compute", "communication", "wait", "received")
    rows = [
        (
            str(rank),
            size(found.now_bytes),
            size(found.peak_bytes),
            milliseconds(found.compute_s),
            milliseconds(found.communication_s),
            milliseconds(found.wait_s),
            f"{size(found.received_per_s)}/s",
        )
        for rank, found in enumerate(ranks)
    ]
    return table(headers, rows)


def _known(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _last(values: list[float]) -> float:
    return (_known(values) or [math.nan])[-1]


def _average(values: list[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else math.nan
