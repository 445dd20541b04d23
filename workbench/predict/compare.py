"""A prediction beside what was measured of the same experiment: as values, text, and HTML."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Span
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.html import Markup, element, frame_of, save, shortened, table, text_table
from workbench.plan.plans.plan import Plan
from workbench.predict.drawing import picture
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction

if TYPE_CHECKING:
    import pandas

MIB = 2**20

_LINES = 40

_DRAWN_RANKS = 4

_THREE = ("predicted", "measured", "error")

_RANKS = (
    "rank",
    *(f"{what} {which}" for what in ("step ms", "peak MiB", "kB received") for which in _THREE),
)

_PARTS = ("what", "predicted ms", "measured ms", "difference ms", "error")

_OF_RANKS = "Every rank: its step, its memory, what it receives"

_OF_PARTS = "Every part of a step, in the mean over ranks; the furthest off first"

_FIELDS = ("batch_size", "accumulate", "precision", "optimizer", "sync", "shard_optimizer")


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run.

    Attributes:
        experiment: the experiment that ran.
        step_s: seconds of each rank's step: the median over its steps, or for local SGD the mean
            [ranks].
        peak_bytes: bytes of each rank's tensors at a step's peak, the median over steps [ranks].
        timelines: the traced steps, ascending.
    """

    experiment: Experiment
    step_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True)
class Pair:
    """A predicted and a measured figure."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """The predicted less the measured figure."""
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """The relative error of the prediction; infinite where the measured figure is 0."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.difference / self.measured


@dataclass(frozen=True)
class OfRank:
    """The predicted and measured figures of one rank.

    Attributes:
        step_s: seconds of a step.
        peak_bytes: bytes of its tensors at the peak.
        received_bytes: bytes that it receives in a traced step.
    """

    rank: int
    step_s: Pair
    peak_bytes: Pair
    received_bytes: Pair


@dataclass(frozen=True, order=True)
class Part:
    """The parts of a step that are compared.

    Attributes:
        what: "forward", "backward", "collective", "loss", "load" or "update".
        label: the layer, or the purpose of a collective.
        op: the recorder's name of a collective: "all_reduce", "all_gather", ...; else "".
        phase: the phase of a collective in the step; else "".
    """

    what: str
    label: str
    op: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.phase or self.what, self.op, self.label)))


@dataclass(frozen=True)
class Comparison:
    """A prediction beside a measurement.

    Attributes:
        prediction: the prediction, with a machine.
        measurement: the measurement of the same plan and batch.
    """

    prediction: Prediction
    measurement: Measurement

    @cached_property
    def ranks(self) -> tuple[OfRank, ...]:
        """The figures of every rank."""
        schedule, measured = self.prediction.timeline, self.measurement
        found = []
        for rank in range(measured.experiment.plan.world_size):
            step = Pair(sum(schedule.breakdown(rank).values()), measured.step_s[rank])
            peak = Pair(self.prediction.memory[rank].peak_bytes, measured.peak_bytes[rank])
            sizes = [
                sum(row[-1] for row in self.prediction.traffic.rows(rank, line.step))
                for line in measured.timelines
            ]
            seen = [sum(span.bytes for span in line.spans(rank)) for line in measured.timelines]
            received = Pair(statistics.fmean(sizes), statistics.fmean(seen))
            found.append(OfRank(rank, step, peak, received))
        return tuple(found)

    @cached_property
    def parts(self) -> dict[Part, Pair]:
        """Seconds of every part of a step, the mean over ranks; the largest difference first.

        The measured figure is the median over the traced steps. Waiting is left out.
        """
        schedule, world = self.prediction.timeline, self.measurement.experiment.plan.world_size
        lines = self.measurement.timelines
        predicted = _sums(span for rank in range(world) for span in schedule.spans(rank))
        measured = [_sums(span for own in line.of_rank for span in own) for line in lines]
        pairs = {
            part: Pair(
                predicted[part] / world,
                statistics.median(sums[part] for sums in measured) / world,
            )
            for part in dict.fromkeys((*predicted, *(part for sums in measured for part in sums)))
        }
        return dict(sorted(pairs.items(), key=lambda item: -abs(item[1].difference)))

    @property
    def step_s(self) -> Pair:
        """Seconds of a step on the slowest rank."""
        slowest = max(self.measurement.step_s)
        return Pair(self.prediction.step_time, slowest)

    @property
    def peak_bytes(self) -> Pair:
        """Bytes at the peak, of the rank with the largest relative error."""
        return max((row.peak_bytes for row in self.ranks), key=lambda pair: abs(pair.error))

    @property
    def timeline(self) -> Timeline:
        """The traced step of median length."""
        lines = sorted(self.measurement.timelines, key=lambda line: line.seconds)
        return lines[len(lines) // 2]

    def __repr__(self) -> str:
        name, step = self.measurement.experiment.plan.graph.source.name, self.step_s
        return (
            f"<Comparison of {name}: step {step.predicted * 1e3:,.4g} ms predicted, "
            f"{step.measured * 1e3:,.4g} ms measured ({step.error:+.1%}); "
            f"peak {self.peak_bytes.error:+.1%}>"
        )

    def __str__(self) -> str:
        return as_text(self)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each part of a step, in seconds; the furthest off first."""
        rows = [
            {
                **asdict(part),
                "predicted_s": pair.predicted,
                "measured_s": pair.measured,
                "difference_s": pair.difference,
                "error": pair.error,
            }
            for part, pair in self.parts.items()
        ]
        measured = ("predicted_s", "measured_s", "difference_s", "error")
        return frame_of(rows, [*(f.name for f in fields(Part)), *measured])

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.csv" has the parts of a step, "x.html" a page.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return as_html(self)


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Compares a prediction with a measurement.

    Raises:
        ExperimentError: they are of different experiments; the text names the first difference.
        MachineError: the prediction was made without a machine.
    """
    if not isinstance(prediction, Prediction):
        raise ExperimentError(f"compare takes a Prediction, got {type(prediction).__name__}")
    difference = next(_differences(prediction.experiment, measurement.experiment), None)
    if difference is not None:
        raise ExperimentError(f"this prediction is for another experiment: {difference}")
    _ = prediction.timeline  # raises a helpful error without a machine
    return Comparison(prediction, measurement)


def _sums(spans: Iterable[Span]) -> Counter[Part]:
    """Seconds of each part of a step, without waiting."""
    found: Counter[Part] = Counter()
    for span in spans:
        if (part := _part(span)) is not None:
            found[part] += span.seconds  # type: ignore[assignment]  # counts need not be whole
    return found


def _part(span: Span) -> Part | None:
    match span.what:
        case "wait" | "step":
            return None
        case "collective":
            return Part("collective", span.label, span.op, span.phase)
        case "load" | "update" | "loss":
            return Part(span.what, "")
        case "backward" if span.label == "loss":
            return Part("loss", "")
    return Part(span.what, span.label)


def _differences(predicted: Experiment, ran: Experiment) -> Iterator[str]:
    """The differences of two experiments that affect the cost of a step."""
    yield from _of_plans(predicted.plan, ran.plan)
    for name in _FIELDS:
        ours, theirs = getattr(predicted, name), getattr(ran, name)
        if ours != theirs:
            yield f"{name} {ours!r}, and the run had {theirs!r}"


def _of_plans(predicted: Plan, ran: Plan) -> Iterator[str]:
    if predicted.graph.fingerprint != ran.graph.fingerprint:
        yield f"model {predicted.graph.source.name}, and the run's is {ran.graph.source.name}"
    if predicted.world_size != ran.world_size:
        yield f"a plan for {predicted.world_size} ranks, and the run had {ran.world_size}"
    for name in ("rounds", "batch_norm", "segments"):
        ours, theirs = getattr(predicted, name), getattr(ran, name)
        if ours != theirs:
            yield f"a plan with {name} {ours!r}, and the run's had {theirs!r}"
    for layer in ran.graph.layers:
        ours, theirs = predicted.layers.get(layer.name), ran.layers.get(layer.name)
        if ours != theirs:
            yield f"layer {layer.name!r} has {ours}, and in the run it had {theirs}"


def as_text(comparison: Comparison) -> str:
    """Both tables as text."""
    tables = (text_table(_RANKS, _ranks(comparison)), text_table(_PARTS, _parts(comparison)))
    return "\n\n".join([repr(comparison), *map("\n".join, tables), _note(comparison)])


def as_html(comparison: Comparison) -> Markup:
    """Both tables as HTML, below the predicted and the measured step of each rank."""
    heading, _, rest = repr(comparison).strip("<>").partition(": ")
    line, schedule = comparison.timeline, comparison.prediction.timeline
    spans = {}
    for rank in range(line.world_size)[:_DRAWN_RANKS]:
        spans[f"{rank} predicted"] = schedule.spans(rank)
        spans[f"{rank} measured"] = line.spans(rank)
    return element(
        "div",
        element("p", element("b", heading), f": {rest}"),
        picture(spans, "Predicted above measured step, rank by rank"),
        table(_RANKS, _ranks(comparison), _OF_RANKS),
        table(_PARTS, _parts(comparison), _OF_PARTS),
        element("p", _note(comparison)),
    )


def _note(comparison: Comparison) -> str:
    steps = [line.step for line in comparison.measurement.timelines]
    some = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return (
        f"Parts of a step, and bytes: as traced in {len(steps)} steps ({some}), their median. "
        "A collective beside the computation lasts until its rank has looked after it."
    )


def _ranks(comparison: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in comparison.ranks[:_LINES]:
        cells = (*_three(row.step_s, 1e3), *_three(row.peak_bytes, 1 / MIB))
        rows.append((str(row.rank), *cells, *_three(row.received_bytes, 1e-3)))
    return shortened(rows, len(comparison.ranks), "ranks")


def _parts(comparison: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part, pair in list(comparison.parts.items())[:_LINES]:
        predicted, measured, error = _three(pair, 1e3)
        rows.append((str(part), predicted, measured, f"{pair.difference * 1e3:+,.3f}", error))
    return shortened(rows, len(comparison.parts), "parts")


def _three(pair: Pair, scale: float) -> Iterable[str]:
    return (
        f"{pair.predicted * scale:,.3f}",
        f"{pair.measured * scale:,.3f}",
        f"{pair.error:+.1%}" if pair.measured else "-",
    )
