"""The timing-model explorer: which step strategy is the fastest, and where that changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import traitlets

from workbench.plan.collective.codec import AnyCodec, as_codec
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.sync import LocalSGD, ParameterServer, Pipelined, Sync, Synchronous
from workbench.plan.extension.extension import installed
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.plan.io.units import (
    brief_seconds,
    count,
    digits,
    milliseconds,
    rate,
    shortened,
    size,
    times,
)
from workbench.plan.machine.device import Link
from workbench.plan.machine.machine import Machine
from workbench.predict.closed_form import (
    Coding,
    Compute,
    Network,
    Range,
    TimingModel,
    fastest,
    where_fastest,
)
from workbench.predict.prediction import predict
from workbench.widgets.drawing.plot import Band, Line, Mark, Scale, plot
from workbench.widgets.drawing.theme import SERIES
from workbench.widgets.explorers.controls import (
    Button,
    Choice,
    Control,
    Slider,
    decades,
    powers_of_two,
)
from workbench.widgets.explorers.explorer import Explorer, LegendEntry, Panel, Picture, Table

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


Looks = Mapping[str, tuple[str, str]]
CODECS: Mapping[str, str | None] = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "top_k (1 %)": "top_k",
}
_BACKWARD = 2 / 3  # of compute, where nothing else is known: two products for each one forward


class TimingExplorer(Explorer):
    """Seconds of a step under every strategy, in closed form, by bandwidth and by world size.

    Args:
        machine: the machine whose links are marked, and whose codecs' costs are used; None: codecs
            are free.
        experiment: the experiment whose gradient and, with a machine, predicted compute time it
            begins with.
        state: first values of the attributes.

    Attributes:
        world_size: number of workers that exchange gradients.
        bandwidth: bandwidth of their network, in bytes/s one way.
        latency_s: latency of a message, in seconds.
        gradient_bytes: Size of the fp32 gradients, in bytes.
        compute_s: seconds of forward and backward pass and update on one worker.
        width: width of the pipeline.
        codec: what gradients become under the strategies that take a codec: a name, or None.
        machine: the machine, or None; another one may be assigned.

    Raises:
        TypeError: a machine or experiment that is none.
        TraitError: a value that cannot be.
    """

    world_size = traitlets.Int(8)
    bandwidth = traitlets.Float(1.25e9)
    latency_s = traitlets.Float(20e-6)
    gradient_bytes = traitlets.Float(100e6)
    compute_s = traitlets.Float(0.1)
    width = traitlets.Int(2)
    codec = traitlets.Unicode("int8", allow_none=True)
    machine = traitlets.Instance(Machine, allow_none=True)

    def __init__(
        self, machine: Machine | None = None, experiment: Experiment | None = None, **state: Any
    ) -> None:
        if not isinstance(machine, Machine | None):
            raise TypeError(
                f"TimingExplorer takes a Machine or None, got {type(machine).__name__}; "
                "cluster.calibrate() measures one, wb.Machine.preset(name) has known ones"
            )
        known = {**({} if machine is None else _of_link(_network(machine)))}
        known |= {} if experiment is None else _of_experiment(experiment, machine)
        super().__init__(machine=machine, **{**known, **state})
        self.observe(self._moved, ["machine"])

    def moves(self) -> Sequence[Control]:
        """Seven sliders and choices, and a way back to the machine's values."""
        none = "" if self.machine is not None else "there is no machine: explorer.machine = machine"
        return (
            Slider("world_size", "workers", powers_of_two(1, 65536), lambda n: f"{n:,}"),
            Slider("bandwidth", "bandwidth", decades(LOW, HIGH), rate),
            Slider("latency_s", "latency", decades(1e-7, 1e-1), brief_seconds),
            Slider("gradient_bytes", "gradient", decades(1e3, 1e11), size),
            Slider("compute_s", "compute", decades(1e-4, 1e2), brief_seconds),
            Slider("width", "pipeline width", range(1, 9), str),
            Choice("codec", "codec", codecs()),
            Button("machine", "Take the machine's link", none),
        )

    def picture(self) -> Picture:
        """Two charts, and the strategies in figures.

        Raises:
            ValueError: the machine or the codec cannot be modelled with these settings.
        """
        try:
            return timing_picture(self.model(), self.width, self._codec, links(self.machine))
        except (MachineError, ExperimentError) as error:
            raise ValueError(str(error)) from None

    def model(self) -> TimingModel:
        """The model at these values; `model().step_s(sync)` is what a curve shows."""
        network = Network(self.bandwidth, self.latency_s)
        return _model(self.machine, self.world_size, self.gradient_bytes, self.compute_s, network)

    def press(self, name: str) -> None:
        """Takes over the bandwidth and latency of the machine's link between workers.

        Raises:
            ValueError: there is no such button, or no machine.
        """
        if name != "machine":
            super().press(name)
        if self.machine is None:
            raise ValueError("there is no machine: explorer.machine = machine")
        with self.hold_trait_notifications():
            for field, value in _of_link(_network(self.machine)).items():
                setattr(self, field, value)

    @property
    def _codec(self) -> AnyCodec | None:
        found: AnyCodec | None = as_codec(self.codec)
        return found

    @traitlets.validate("bandwidth", "latency_s", "gradient_bytes", "compute_s")
    def _is_positive(self, proposal: Mapping[str, Any]) -> float:
        value: float = proposal["value"]
        if not 0 < value < float("inf"):
            name = proposal["trait"].name
            raise traitlets.TraitError(f"{name} must be a positive number, got {value!r}")
        return value

    @traitlets.validate("world_size", "width")
    def _is_a_count(self, proposal: Mapping[str, Any]) -> int:
        value: int = proposal["value"]
        if value < 1:
            name = proposal["trait"].name
            raise traitlets.TraitError(f"{name} must be a positive integer, got {value!r}")
        return value

    @traitlets.validate("codec")
    def _is_known(self, proposal: Mapping[str, Any]) -> str | None:
        value: str | None = proposal["value"]
        known = codecs().values()
        if value not in known:
            names = ", ".join(str(name) for name in known)
            raise traitlets.TraitError(f"codec must be one of {names}, got {value!r}")
        return value


def codecs() -> Mapping[str, str | None]:
    """The names of codecs, by how they read: those that are built in, and installed ones."""
    return {**CODECS, **{name: name for name in installed("codecs")}}


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


def strategies(width: int, codec: AnyCodec | None) -> dict[str, Sync]:
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


def timing_picture(
    model: TimingModel, width: int, codec: AnyCodec | None, marked: Sequence[Known] = ()
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


def _looks(systems: Mapping[str, Sync]) -> Looks:
    """Color and dash of each; whatever makes it inexact is drawn dashed."""
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
    legend = tuple(LegendEntry(name, looks[name][0], milliseconds(here[name]), looks[name][1])
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
    floor = LegendEntry("compute alone", "faint", milliseconds(bound))
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


def model_of(machine: Machine, experiment: Experiment) -> TimingModel:
    """The model of an experiment on a machine: its network, and its predicted compute time.

    Raises:
        TypeError: an experiment that is none.
        MachineError: the machine has fewer devices than the experiment's plan has ranks.
    """
    known, link = _of_experiment(experiment, machine), _of_link(_network(machine))
    sizes = known["world_size"], known["gradient_bytes"], known["compute_s"]
    return _model(machine, *sizes, Network(link["bandwidth"], link["latency_s"]))


def _model(
    machine: Machine | None,
    world_size: int,
    gradient_bytes: float,
    compute_s: float,
    network: Network,
) -> TimingModel:
    costs = {} if machine is None else machine.devices[0].coding_s_per_byte
    if machine is not None:
        reduction = _network(machine).reduction_s_per_byte
        network = replace(network, reduction_s_per_byte=reduction)
    return TimingModel(
        workers=world_size,
        gradient_bytes=gradient_bytes,
        compute=Compute(0.0, (1 - _BACKWARD) * compute_s, _BACKWARD * compute_s),
        network=network,
        coding={name: Coding(both / 2, both / 2) for name, both in costs.items()},
    )


def _network(machine: Machine) -> Link:
    """Between workers that gradients travel between: of several hosts, the hosts'."""
    return machine.within if machine.across is None else machine.across


def _of_link(link: Link) -> dict[str, Any]:
    return {"bandwidth": link.bandwidth, "latency_s": max(link.latency_s, 1e-9)}


def _of_experiment(experiment: Experiment, machine: Machine | None) -> dict[str, Any]:
    if not isinstance(experiment, Experiment):
        raise TypeError(f"an experiment is a wb.Experiment, got {type(experiment).__name__}")
    plan = experiment.plan
    found: dict[str, Any] = {
        "world_size": plan.world_size,
        "gradient_bytes": 4.0 * sum(layer.parameters for layer in plan.graph.layers),
    }
    if machine is not None:
        schedule = predict(plan, machine, experiment).timeline
        found["compute_s"] = float(schedule.work.mean())
    return found
