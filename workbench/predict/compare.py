"""A prediction beside what was measured of the same experiment."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.plan.span import Span
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction
from workbench.predict.show_comparison import as_html, as_text

_FIELDS = ("batch_size", "accumulate", "precision", "optimizer", "sync", "shard_optimizer")


@dataclass(frozen=True)
class Measurement:
    """What was measured of a run.

    Attributes:
        experiment: that ran.
        step_s: seconds of a step, of each rank: the median over its steps.
        peak_bytes: of its tensors in a step, likewise.
        timelines: of the steps that were traced, ascending.
    """

    experiment: Experiment
    step_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True)
class Pair:
    """One figure."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Predicted less measured."""
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured; infinite where that is nothing."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.difference / self.measured


@dataclass(frozen=True)
class OfRank:
    """The figures of one rank.

    Attributes:
        step_s: seconds of a step.
        peak_bytes: of its tensors.
        received_bytes: in a step of those that were traced.
    """

    rank: int
    step_s: Pair
    peak_bytes: Pair
    received_bytes: Pair


@dataclass(frozen=True, order=True)
class Part:
    """What of a step is compared.

    Attributes:
        what: "forward", "backward", "collective", "loss", "load" or "update".
        label: the layer; of a collective, what it is for.
        op: of a collective, as the recorder names it.
        phase: of a collective.
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
        prediction: with a machine.
        measurement: of the same plan and batch.
    """

    prediction: Prediction
    measurement: Measurement

    @cached_property
    def ranks(self) -> tuple[OfRank, ...]:
        """Every rank's figures."""
        schedule, measured = self.prediction.timeline, self.measurement
        found = []
        for rank in range(measured.experiment.plan.world_size):
            step = Pair(sum(schedule.breakdown(rank).values()), measured.step_s[rank])
            peak = Pair(self.prediction.memory[rank].peak_bytes, measured.peak_bytes[rank])
            sizes = [self._predicted_bytes(rank, line.step) for line in measured.timelines]
            seen = [sum(span.bytes for span in line.spans(rank)) for line in measured.timelines]
            received = Pair(statistics.fmean(sizes), statistics.fmean(seen))
            found.append(OfRank(rank, step, peak, received))
        return tuple(found)

    @cached_property
    def parts(self) -> dict[Part, Pair]:
        """Seconds of every part of a step, in the mean over ranks; the furthest off first.

        What was measured is the median over the traced steps. Waiting is left out.
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
        """Seconds of a step, of the slowest rank."""
        slowest = max(self.measurement.step_s)
        return Pair(self.prediction.step_time, slowest)

    @property
    def peak_bytes(self) -> Pair:
        """Of the rank that is furthest off."""
        return max((row.peak_bytes for row in self.ranks), key=lambda pair: abs(pair.error))

    @property
    def timeline(self) -> Timeline:
        """The traced step that took neither longest nor shortest."""
        lines = sorted(self.measurement.timelines, key=lambda line: line.seconds)
        return lines[len(lines) // 2]

    def _predicted_bytes(self, rank: int, step: int) -> int:
        """What a rank receives in this step; an averaging is not in every one."""
        collectives = self.prediction.traffic.collectives
        return sum(one.bytes[rank] for one in collectives if (step + 1) % one.every == 0)

    def __repr__(self) -> str:
        name, step = self.measurement.experiment.plan.graph.source.name, self.step_s
        return (
            f"<Comparison of {name}: step {step.predicted * 1e3:,.4g} ms predicted, "
            f"{step.measured * 1e3:,.4g} ms measured ({step.error:+.1%}); "
            f"peak {self.peak_bytes.error:+.1%}>"
        )

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Sets a prediction beside a measurement.

    Raises:
        ExperimentError: they are of different experiments; the text names the first difference.
        MachineError: the prediction was made without a machine.
    """
    if not isinstance(prediction, Prediction):
        raise ExperimentError(f"compare takes a Prediction, got {type(prediction).__name__}")
    difference = next(_differences(prediction.experiment, measurement.experiment), None)
    if difference is not None:
        raise ExperimentError(f"this prediction is for another experiment: {difference}")
    _ = prediction.timeline  # which says what to do where there is no machine
    return Comparison(prediction, measurement)


def _sums(spans: Iterable[Span]) -> Counter[Part]:
    """Seconds of each part of a step, waiting left out."""
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
    """What makes two experiments different ones, as far as a step's cost goes."""
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
