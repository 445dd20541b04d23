"""What the timing explorer draws: a step's time by bandwidth and by workers, and who wins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.plan.codec import Codec
from workbench.plan.machine import Machine
from workbench.plan.sync import LocalSGD, ParameterServer, Pipelined, Sync, Synchronous
from workbench.predict.timing import Range, TimingModel, fastest, where_fastest
from workbench.widgets.explorers.colours import SERIES
from workbench.widgets.explorers.picture import Entry, Panel, Picture, Table
from workbench.widgets.explorers.plot import Band, Line, Mark, Scale, plot
from workbench.widgets.explorers.reading import brief_seconds, count, rate, shortened, times
from workbench.widgets.units import digits, milliseconds

ONE_CALL = 2**62
LOW, HIGH = 1e6, 1e12  # bandwidths, in bytes/s
_POINTS = 90
_MOST_WORKERS = 65536


@dataclass(frozen=True)
class Known:
    """A link that a machine has."""

    name: str
    bandwidth: float
    latency_s: float


def links(machine: Machine | None) -> tuple[Known, ...]:
    """Those of a machine: between its hosts, and within one."""
    if machine is None:
        return ()
    pairs = (("between hosts", machine.across), ("within a host", machine.within))
    return tuple(
        Known(f"{shortened(machine.name, 22)}, {where}", link.bandwidth, link.latency_s)
        for where, link in pairs
        if link is not None
    )


def strategies(width: int, codec: Codec | None) -> dict[str, Sync]:
    """What is compared, the simplest first: it is named where several are equally fast."""
    found: dict[str, Sync] = {
        "synchronous": Synchronous(algorithm="ring", bucket_bytes=ONE_CALL),
        "synchronous, direct": Synchronous(algorithm="direct", bucket_bytes=ONE_CALL),
        "synchronous, overlapped": Synchronous(algorithm="ring"),
        "parameter server": ParameterServer(bucket_bytes=ONE_CALL),
        "local SGD, every 5": LocalSGD(every=5),
    }
    if width > 1:
        found[f"pipelined, width {width}"] = Pipelined(width=width, algorithm="ring")
    if codec is not None:
        found[f"synchronous, {codec.name}"] = Synchronous(
            algorithm="ring", bucket_bytes=ONE_CALL, codec=codec
        )
        if width > 1:
            found[f"pipelined, width {width}, {codec.name}"] = Pipelined(
                width=width, algorithm="ring", codec=codec
            )
    return found


def of(
    model: TimingModel, width: int, codec: Codec | None, marked: Sequence[Known] = ()
) -> Picture:
    """The picture at one point of the model.

    Raises:
        MachineError, ExperimentError: the model has no such point.
    """
    systems = strategies(width, codec)
    looks = _looks(systems)
    here = {name: model.step_s(sync) for name, sync in systems.items()}
    best, usual = fastest(model, systems), here["synchronous"]
    bandwidth = model.network.bandwidth
    ranges = where_fastest(model, systems, LOW, HIGH)
    said = [
        f"At {rate(bandwidth)} and {model.workers:,} workers {best} is the fastest: "
        f"{milliseconds(here[best])} per step, {usual / here[best]:.2f} times as fast as "
        "synchronous steps with one ring all-reduce.",
        "By bandwidth, the fastest: "
        + "; ".join(f"{rate(r.low)} to {rate(r.high)} {r.name}" for r in ranges)
        + ".",
    ]
    said += [_at_link(model, systems, link) for link in marked]
    return Picture(
        f"Seconds of a step: {model.workers:,} workers, {rate(bandwidth)}, "
        f"{milliseconds(model.compute.seconds)} of compute",
        tuple(said),
        (
            _by_bandwidth(model, systems, looks, here, ranges, marked),
            _by_workers(model, systems, looks),
        ),
        _table(model, systems, here),
    )


def _at_link(model: TimingModel, systems: Mapping[str, Sync], link: Known) -> str:
    network = {"bandwidth": link.bandwidth}
    name = fastest(model.at(**network), systems)
    seconds = model.at(**network).step_s(systems[name])
    return f"Over {link.name} ({rate(link.bandwidth)}): {name}, {milliseconds(seconds)} per step."


Looks = Mapping[str, tuple[str, str]]


def _looks(systems: Mapping[str, Sync]) -> Looks:
    """Colour and dash of each; whatever makes it inexact is drawn dashed."""
    return {
        name: (SERIES[index], "6 3" if sync.inexact else "")
        for index, (name, sync) in enumerate(systems.items())
    }


def _by_bandwidth(
    model: TimingModel,
    systems: Mapping[str, Sync],
    looks: Looks,
    here: Mapping[str, float],
    ranges: Sequence[Range],
    marked: Sequence[Known],
) -> Panel:
    bandwidth = model.network.bandwidth
    rates = [float(value) for value in np.geomspace(LOW, HIGH, _POINTS)]
    lines = _lines(systems, looks, rates, lambda x: model.at(bandwidth=x))
    bands = [
        Band(r.low, r.high, looks[r.name][0], f"{rate(r.low)} to {rate(r.high)}: {r.name}")
        for r in ranges
    ]
    marks = [Mark(bandwidth, rate(bandwidth))]
    marks += [Mark(link.bandwidth, link.name, "purple", "3 3") for link in marked]
    svg = plot(
        lines,
        Scale("bandwidth of the links", rate),
        Scale("a step", brief_seconds),
        marks=marks,
        bands=bands,
    )
    legend = tuple(Entry(name, looks[name][0], milliseconds(here[name]), looks[name][1])
                   for name in systems)  # fmt: skip
    alt = "A step's time by bandwidth, a curve for each strategy; the strip below is the fastest."
    return Panel("By bandwidth; the strip says who wins", svg, alt, legend)


def _by_workers(model: TimingModel, systems: Mapping[str, Sync], looks: Looks) -> Panel:
    sizes = [2**power for power in range(_MOST_WORKERS.bit_length())]
    lines = _lines(systems, looks, sizes, lambda x: model.at(workers=int(x)))
    bands, begin = [], 0
    winners = [fastest(model.at(workers=size), systems) for size in sizes]
    for index, name in enumerate(winners):
        if index + 1 == len(winners) or winners[index + 1] != name:
            end = min(index + 1, len(sizes) - 1)
            bands.append(Band(sizes[begin], sizes[end], looks[name][0], name))
            begin = end
    svg = plot(
        lines,
        Scale("workers", count, base=2),
        Scale("a step", brief_seconds),
        marks=[Mark(model.workers, f"{model.workers:,} workers")],
        bands=bands,
    )
    alt = "A step's time by the number of workers, a curve for each strategy."
    bound = model.compute.seconds
    floor = Entry("compute alone", "faint", milliseconds(bound))
    return Panel("By workers", svg, alt, (floor,))


def _lines(
    systems: Mapping[str, Sync],
    looks: Looks,
    xs: Sequence[float],
    at: Callable[[float], TimingModel],
) -> list[Line]:
    models = [at(x) for x in xs]
    return [
        Line(name, xs, [each.step_s(sync) for each in models], *looks[name])
        for name, sync in systems.items()
    ]


def _table(model: TimingModel, systems: Mapping[str, Sync], here: Mapping[str, float]) -> Table:
    usual = here["synchronous"]
    rows = [
        (
            name,
            milliseconds(here[name]),
            milliseconds(model.communication_s(sync)),
            digits(model.r(sync)),
            times(usual / here[name]),
            sync.inexact or "exact",
        )
        for name, sync in sorted(systems.items(), key=lambda pair: here[pair[0]])
    ]
    head = ("strategy", "step", "communication", "communication / compute", "gain", "computes")
    return Table("Strategies, the fastest first", head, tuple(rows))
