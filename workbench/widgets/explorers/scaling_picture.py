"""What the scaling explorer draws: throughput by ranks, and how much of a step is communication."""

from collections.abc import Mapping, Sequence

from workbench.predict.scaling import Point
from workbench.widgets.explorers.picture import Entry, Panel, Picture, Table
from workbench.widgets.explorers.plot import Line, Mark, Scale, plot
from workbench.widgets.explorers.reading import count, shortened
from workbench.widgets.units import digits, milliseconds

KINDS = {"strong": "the same batch", "weak": "the same rows on each rank"}
_LOOKS = {"strong": ("blue", ""), "weak": ("vermilion", "7 3")}
Curves = Mapping[str, Sequence[Point]]


def of(
    name: str, curves: Curves, looked_at: int, world: int, left: int, notes: tuple[str, ...]
) -> Picture:
    """The picture, of as many points as are known.

    Args:
        name: of the model.
        curves: points by kind, ascending.
        looked_at: the world size that is pointed at.
        world: the plan's own.
        left: world sizes that are still to be predicted.
        notes: what else should be known.
    """
    here = {
        kind: point for kind, points in curves.items() for point in points
        if point.world_size == looked_at
    }  # fmt: skip
    said = [_at(kind, point, curves[kind]) for kind, point in here.items()]
    said += [_dominates(kind, points) for kind, points in curves.items() if points]
    known = max(map(len, curves.values()))
    return Picture(
        f"{shortened(name, 60)}, planned for {world:,} ranks, on {looked_at:,}",
        (*said, *notes),
        (_throughput(curves, here, looked_at), _shares(curves, here, looked_at)) if known else (),
        _table(curves),
        f"{left} more world sizes are predicted …" if left else "",
    )


def dominates_at(points: Sequence[Point]) -> int | None:
    """The first world size where communication and waiting take more than work."""
    return next((p.world_size for p in points if p.exposed_s > p.work_s), None)


def _at(kind: str, point: Point, points: Sequence[Point]) -> str:
    speedup = point.samples_per_s / points[0].samples_per_s
    return (
        f"{kind.capitalize()} ({KINDS[kind]}): on {point.world_size:,} ranks a step of "
        f"{point.batch_size:,} samples takes {milliseconds(point.step_time)}, "
        f"{point.samples_per_s:,.0f} samples/s, {digits(speedup)} times as many as on "
        f"{points[0].world_size:,}; {100 * point.efficiency:.0f} % of the ranks' time is work."
    )


def _dominates(kind: str, points: Sequence[Point]) -> str:
    at, name = dominates_at(points), kind.capitalize()
    if at is None:
        most = points[-1].world_size
        return f"{name}: work takes more than communication up to {most:,} ranks."
    return f"{name}: communication and waiting take more than work from {at:,} ranks on."


def _throughput(curves: Curves, here: Mapping[str, Point], looked_at: int) -> Panel:
    lines = [
        Line(kind, _sizes(points), [p.samples_per_s for p in points], *_LOOKS[kind], dots=True)
        for kind, points in curves.items()
    ]
    first = next((points[0] for points in curves.values() if points), None)
    if first is not None:
        sizes = _sizes(max(curves.values(), key=len))
        ideal = [first.samples_per_s * size / first.world_size for size in sizes]
        lines.append(Line("ideal", sizes, ideal, "gray", "2 3"))
    svg = plot(
        lines,
        Scale("ranks", count, base=2),
        Scale("samples/s", _brief),
        marks=[Mark(looked_at, f"{looked_at:,} ranks")],
    )
    legend = [
        Entry(kind, _LOOKS[kind][0], f"{digits(point.samples_per_s)} samples/s", _LOOKS[kind][1])
        for kind, point in here.items()
    ]
    alt = "Samples per second by ranks: strong and weak scaling, and the ideal."
    return Panel("Throughput", svg, alt, (*legend, Entry("ideal", "gray", "", "2 3")))


def _shares(curves: Curves, here: Mapping[str, Point], looked_at: int) -> Panel:
    lines = [
        Line(kind, _sizes(points), [_share(p) for p in points], *_LOOKS[kind], dots=True)
        for kind, points in curves.items()
    ]
    sizes = _sizes(max(curves.values(), key=len))
    if sizes:
        ends = [sizes[0], sizes[-1]]
        lines.append(Line("as much as work", ends, [50.0, 50.0], "gray", "2 3"))
    svg = plot(
        lines,
        Scale("ranks", count, base=2),
        Scale("communication and waiting", lambda value: f"{value:g} %", log=False),
        marks=[Mark(looked_at, f"{looked_at:,} ranks")],
        top=100.0,
    )
    legend = [
        Entry(kind, _LOOKS[kind][0], f"{_share(point):.0f} %", _LOOKS[kind][1])
        for kind, point in here.items()
    ]
    alt = "The part of a step that is communication and waiting, by ranks."
    half = Entry("as much as work", "gray", "", "2 3")
    return Panel("Communication and waiting, of a step", svg, alt, (*legend, half))


def _share(point: Point) -> float:
    return 100 * point.exposed_s / point.step_time


def _sizes(points: Sequence[Point]) -> list[float]:
    return [float(point.world_size) for point in points]


def _brief(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def _table(curves: Curves) -> Table:
    rows = tuple(
        (
            f"{point.world_size:,}",
            kind,
            f"{point.batch_size:,}",
            milliseconds(point.step_time),
            digits(point.samples_per_s),
            f"{100 * point.efficiency:.1f} %",
            milliseconds(point.exposed_s),
        )
        for kind, points in curves.items()
        for point in points
    )
    head = (
        "ranks",
        "scaling",
        "batch",
        "step",
        "samples/s",
        "efficiency",
        "communication, waiting",
    )
    return Table("Strong and weak scaling", head, rows)
