"""The scaling explorer: the same plan on up to 65,536 ranks, and on other links and devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.io.units import count, digits, milliseconds, shortened
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import Prediction
from workbench.predict.scaling import MOST_RANKS, Point
from workbench.widgets.base.widget import LatestWorker
from workbench.widgets.drawing.plot import Line, Mark, Scale, plot
from workbench.widgets.explorers.controls import Choice, Control, Slider
from workbench.widgets.explorers.explorer import Explorer, LegendEntry, Panel, Picture, Table
from workbench.widgets.explorers.memory_map import require

KINDS = {"strong": "the same batch", "weak": "the same rows on each rank"}
_LOOKS = {"strong": ("blue", ""), "weak": ("vermilion", "7 3")}
Curves = Mapping[str, Sequence[Point]]
_AS_IT_IS = "as it is"


class ScalingExplorer(Explorer):
    """What if: strong and weak scaling of a prediction, and where communication takes over.

    The curves are computed beside the notebook, size by size; `settle` waits for them. A machine
    with measured devices for so many ranks has its first one on all ranks here.

    Args:
        prediction: a prediction for any number of ranks, with a machine.
        state: first values of the attributes.

    Attributes:
        prediction: the prediction; another one may be assigned.
        world_size: number of ranks that is looked at; one of `sizes`.
        link: a known machine's name, whose link is taken, or ""; as `Prediction.at` has it.
        device: a known machine's name, whose device is taken, or "".
        curves: points that are known, by "strong" and "weak"; read-only.

    Raises:
        TypeError: no prediction.
        TraitError: a value that cannot be.
    """

    prediction = traitlets.Instance(Prediction)
    world_size = traitlets.Int(1)
    link = traitlets.Unicode()
    device = traitlets.Unicode()

    def __init__(self, prediction: Prediction, **state: Any) -> None:
        require(prediction, "ScalingExplorer")
        self._reset(prediction)
        self._worker = LatestWorker(self._compute, "scaling explorer", lambda: None)
        world = prediction.experiment.plan.world_size
        super().__init__(**{"prediction": prediction, "world_size": world, **state})
        self.observe(self._another, ["prediction"])
        self.observe(self._elsewhere, ["link", "device"])
        self._ask()

    @property
    def sizes(self) -> tuple[int, ...]:
        """World sizes of the curves: the plan's, halved and doubled as far as its groups allow."""
        return sizes_of(self.prediction.experiment.plan)

    @property
    def curves(self) -> Curves:
        """As far as they are known."""
        with self.guard:
            return {kind: tuple(points) for kind, points in self._curves.items()}

    def moves(self) -> Sequence[Control]:
        """The world size, and where the ranks are."""
        known = {_AS_IT_IS: "", **{name: name for name in Machine.presets()}}
        return (
            Slider("world_size", "ranks", self.sizes, lambda n: f"{n:,}"),
            Choice("link", "links", known),
            Choice("device", "devices", known),
        )

    def picture(self) -> Picture:
        """Throughput and the share of communication, by ranks.

        Raises:
            ValueError: the prediction cannot be scaled; the message says why.
        """
        if self._why_not:
            raise ValueError(self._why_not)
        plan = self.prediction.experiment.plan
        return scaling_picture(
            plan.graph.source.name,
            self.curves,
            self.world_size,
            plan.world_size,
            self._left,
            tuple(self._notes),
        )

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until the curves are complete; whether that was in time."""
        return self._worker.settle(timeout)

    def close(self) -> None:
        """Ends the view and its thread."""
        self._worker.close()
        super().close()

    def _reset(self, prediction: Prediction) -> None:
        self._curves: dict[str, list[Point]] = {kind: [] for kind in KINDS}
        self._notes: dict[str, None] = {}
        self._why_not, self._left = "", len(sizes_of(prediction.experiment.plan))
        machine = prediction.machine
        if machine is not None and len(machine.devices) > 1:
            self._notes["All ranks are taken to be as rank 0 of the machine."] = None

    def _ask(self) -> None:
        with self.guard:
            self._reset(self.prediction)
            self._worker.ask((self.prediction, self.link, self.device))

    def _compute(self, question: tuple[Prediction, str, str]) -> None:
        """Both curves, on the worker's thread; what is superseded ends at the next point."""
        prediction, link, device = question
        try:
            there = moved(prediction, link, device)
        except (MachineError, ExperimentError, PlanError) as error:
            self._tell({}, why_not=str(error))
            return
        for size in sizes_of(prediction.experiment.plan):
            if self._worker.superseded():
                return
            self._tell(*points(there, size))

    def _tell(self, found: Mapping[str, Point], note: str = "", why_not: str = "") -> None:
        with self.guard:
            if self._worker.superseded():
                return
            for kind, point in found.items():
                self._curves[kind].append(point)
            if note:
                self._notes[note] = None
            self._why_not, self._left = why_not, self._left - 1
            self.refresh()
            self.keep_soon()

    def _another(self, change: Mapping[str, Any]) -> None:
        with self.guard, self.hold_trait_notifications():
            if self.world_size not in self.sizes:
                self.world_size = self.prediction.experiment.plan.world_size
        self._elsewhere(change)

    def _elsewhere(self, change: Mapping[str, Any]) -> None:
        self._ask()
        self.refresh()

    @traitlets.validate("world_size")
    def _is_a_size(self, proposal: Mapping[str, Any]) -> int:
        size: int = proposal["value"]
        if size not in self.sizes:
            known = ", ".join(map(str, self.sizes))
            raise traitlets.TraitError(f"world_size is one of {known}; got {size}")
        return size

    @traitlets.validate("link", "device")
    def _is_a_machine(self, proposal: Mapping[str, Any]) -> str:
        name: str = proposal["value"]
        if name and name not in Machine.presets():
            known = ", ".join(Machine.presets())
            raise traitlets.TraitError(f"no known machine {name!r}; there are {known}")
        return name


def scaling_picture(
    name: str, curves: Curves, looked_at: int, world: int, left: int, notes: tuple[str, ...]
) -> Picture:
    """The picture, of as many points as are known.

    Args:
        name: the model's name.
        curves: points by kind, ascending.
        looked_at: the world size that is pointed at.
        world: the plan's own world size.
        left: number of world sizes that are still to be predicted.
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
        LegendEntry(
            kind, _LOOKS[kind][0], f"{digits(point.samples_per_s)} samples/s", _LOOKS[kind][1]
        )
        for kind, point in here.items()
    ]
    alt = "Samples per second by ranks: strong and weak scaling, and the ideal."
    return Panel("Throughput", svg, alt, (*legend, LegendEntry("ideal", "gray", "", "2 3")))


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
        LegendEntry(kind, _LOOKS[kind][0], f"{_share(point):.0f} %", _LOOKS[kind][1])
        for kind, point in here.items()
    ]
    alt = "The part of a step that is communication and waiting, by ranks."
    half = LegendEntry("as much as work", "gray", "", "2 3")
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


def sizes_of(plan: Plan) -> tuple[int, ...]:
    """World sizes that a plan can have, by factors of two, up to 65,536."""
    whole = math.lcm(*(layer.group_size for layer in plan.layers.values()), 1)
    size = plan.world_size
    while size % 2 == 0 and size // 2 % whole == 0:
        size //= 2
    found = [size]
    while 2 * found[-1] <= MOST_RANKS:
        found.append(2 * found[-1])
    return tuple(found)


def moved(prediction: Prediction, link: str, device: str) -> Prediction:
    """The prediction on other links and devices, the same for every rank.

    Raises:
        MachineError: there is no machine.
    """
    machine = prediction.machine
    if machine is None:
        raise MachineError(
            "time needs a machine: wb.predict(plan, machine, experiment), where a machine is "
            "wb.Machine.preset(name) or what cluster.calibrate() measures"
        )
    return prediction.at(link=link or None, device=device or machine.devices[0])


def points(prediction: Prediction, size: int) -> tuple[dict[str, Point], str]:
    """A point of each curve; and why there is none, where there is none."""
    found: dict[str, Point] = {}
    reason = ""
    curves = {"strong": prediction.strong_scaling, "weak": prediction.weak_scaling}
    for kind, curve in curves.items():
        try:
            (found[kind],) = curve([size]).points
        except (ExperimentError, PlanError, MachineError) as error:
            reason = f"Nothing is known of {kind} scaling on {size:,} ranks: {error}"
    return found, reason
