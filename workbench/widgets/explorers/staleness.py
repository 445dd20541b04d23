"""The staleness and compression explorer: what late and coarse gradients cost, and buy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import traitlets

from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.sync import Pipelined, Synchronous
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.plan.io.units import brief_seconds, digits, milliseconds, percent, times
from workbench.plan.machine.machine import Machine
from workbench.predict.closed_form import Compute, Network, TimingModel
from workbench.widgets.drawing.plot import Line, Mark, Scale, plot
from workbench.widgets.explorers.controls import Choice, Control, Slider, decades
from workbench.widgets.explorers.descent import GOALS, Descent, Goal, losses, recognised, steps_to
from workbench.widgets.explorers.explorer import Explorer, LegendEntry, Panel, Picture, Table
from workbench.widgets.explorers.stability import limit
from workbench.widgets.explorers.timing import ONE_CALL, model_of

WIDTHS = (1, 2, 3, 4, 6, 8)
_LOOKS = (("blue", ""), ("vermilion", "7 3"), ("green", ""), ("purple", "2 3"))
_FLOOR = 1e-7
_FRACTION = 0.1  # of values that "top_k" sends here, of gradients that are short
CODECS: Mapping[str, Codec | None] = {
    "none": None,
    "bf16": Codec(name="bf16"),
    "int8": Codec(name="int8"),
    "int4": Codec(name="int4"),
    "int4, error feedback": Codec(name="int4", error_feedback=True),
    "top_k, 10 %": Codec(name="top_k", fraction=_FRACTION),
    "top_k, 10 %, error feedback": Codec(name="top_k", fraction=_FRACTION, error_feedback=True),
}
USUAL = TimingModel(4, 100e6, Compute(0.0, 0.03, 0.06), Network(1.25e9, 50e-6))


class StalenessExplorer(Explorer):
    """Loss by step and by time, of steps whose gradients are late, coarse, both or neither.

    The loss is a quadratic one, or that of recognising real handwritten digits by softmax
    regression; of both, every step is computed, codec included. Whether steps are stable is exact
    on the first and a guide on the second. Times are those of a timing model.

    Args:
        model: a model of times; or a machine, preset or calibrated, whose network and compute times
            the experiment's gradients are to have; None: four workers, 100 MB of gradient and 90 ms
            of compute.
        experiment: what is timed on a machine; only with one.
        state: first values of the attributes.

    Attributes:
        loss: the loss that is descended, "quadratic" or "digits".
        width: width of the pipeline.
        codec: a name in `CODECS`: "none", "int8", ...
        lr: learning rate times the largest curvature at the beginning.
        momentum: momentum of SGD.
        condition: largest curvature over smallest, of the quadratic loss.
        r: communication of uncoded gradients over compute, which sets the model's bandwidth.
        model: the model of times, at this `r`.

    Raises:
        TypeError: a model that is none, or a machine without an experiment.
        TraitError: a value that cannot be.
    """

    loss = traitlets.Enum(tuple(GOALS), "quadratic")
    width = traitlets.Int(2, min=1, max=16)
    codec = traitlets.Enum(tuple(CODECS), "int8")
    lr = traitlets.Float(0.3)
    momentum = traitlets.Float(0.0)
    condition = traitlets.Float(20.0)
    r = traitlets.Float(1.0)

    def __init__(
        self,
        model: TimingModel | Machine | None = None,
        experiment: Experiment | None = None,
        **state: Any,
    ) -> None:
        if isinstance(model, Machine):
            if experiment is None:
                raise TypeError("with a machine, StalenessExplorer takes an experiment to time")
            model = model_of(model, experiment)
        if not isinstance(model, TimingModel | None):
            raise TypeError(
                "StalenessExplorer takes a wb.TimingModel, a wb.Machine with an experiment, or "
                f"None; got {type(model).__name__}"
            )
        self._model = USUAL if model is None else model
        if model is not None:
            state = {"r": model.r(), **state}
        super().__init__(**state)
        self.observe(self._moved, ["condition"])  # also where it is not shown at first

    @property
    def model(self) -> TimingModel:
        """The timing model, with the bandwidth at which communication over compute is `r`.

        Raises:
            MachineError: its latency alone takes longer.
        """
        return self._model.at(bandwidth=self._model.bandwidth_for(self.r))

    @property
    def run(self) -> Descent:
        """What is computed at these values."""
        steps = 400 if self.loss == "quadratic" else 240
        codec = CODECS[self.codec]
        rest = self.condition, self.loss, steps
        return Descent(self.lr, self.width, self.momentum, codec, *rest)

    def moves(self) -> Sequence[Control]:
        """What is late, what is lost, how steps are taken, and what travelling costs."""
        momenta = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
        known = decades(1.0, 1e4, 8)
        condition = Slider("condition", "condition number", known, lambda x: f"{x:,.0f}")
        return (
            Choice("loss", "loss", {name: name for name in GOALS}),
            Slider("width", "pipeline width", range(1, 9), str),
            Choice("codec", "codec", {name: name for name in CODECS}),
            Slider("lr", "lr × curvature", decades(1e-3, 4.0), lambda x: f"{x:.3g}"),
            Slider("momentum", "momentum", momenta, lambda x: f"{x:g}"),
            *([condition] if self.loss == "quadratic" else []),
            Slider("r", "communication / compute", decades(0.01, 100.0), times),
        )

    def picture(self) -> Picture:
        """Loss by step and by time, the limit of stability by width, and a table of widths.

        Raises:
            ValueError: the run cannot be modelled with these settings.
        """
        try:
            return staleness_picture(self.run, self.codec, self.model)
        except (MachineError, ExperimentError) as error:
            raise ValueError(str(error)) from None

    @traitlets.validate("lr", "condition", "r")
    def _is_positive(self, proposal: Mapping[str, Any]) -> float:
        name, value = proposal["trait"].name, float(proposal["value"])
        least = 1.0 if name == "condition" else 0.0
        if not least <= value < float("inf") or value == 0:
            least_said = "1 or more" if least else "positive"
            raise traitlets.TraitError(f"{name} must be {least_said}, got {value!r}")
        return value

    @traitlets.validate("momentum")
    def _is_a_momentum(self, proposal: Mapping[str, Any]) -> float:
        value = float(proposal["value"])
        if not 0 <= value < 1:
            raise traitlets.TraitError(f"momentum must be in [0, 1), got {value!r}")
        return value


def staleness_picture(run: Descent, codec: str, model: TimingModel) -> Picture:
    """The picture of a run, beside those without what it has.

    Args:
        run: a descent that is late, coarse, or both.
        codec: the name of its codec.
        model: the model of a step's time.

    Raises:
        ExperimentError: the model has no time for one of them.
    """
    runs = beside(run, codec)
    curves = {name: losses(one) for name, one in runs.items()}
    seconds = {name: step_s(one, model) for name, one in runs.items()}
    looks = dict(zip(runs, _LOOKS, strict=False))
    stable, goal = limit(run.width, run.momentum), GOALS[run.problem]
    said = [_stable(run, stable), _reached(curves, seconds, goal), *_recognised(runs)]
    return Picture(
        f"Late by {run.width - 1} steps, codec {codec}: loss by step and by time",
        tuple(said),
        (
            _by_step(curves, looks),
            _by_time(curves, seconds, looks, goal),
            _limits(run),
        ),
        _table(run, codec, model),
    )


def beside(run: Descent, codec: str) -> dict[str, Descent]:
    """The run, and what it is without its lateness, its codec, and both; by name."""
    found = {"synchronous": replace(run, width=1, codec=None)}
    if run.width > 1:
        found[f"width {run.width}"] = replace(run, codec=None)
    if run.codec is not None:
        found[f"synchronous, {codec}"] = replace(run, width=1)
        if run.width > 1:
            found[f"width {run.width}, {codec}"] = run
    return found


def step_s(run: Descent, model: TimingModel) -> float:
    """Seconds of one of its steps."""
    codec: Codec | None = run.codec
    if run.width > 1:
        return model.step_s(Pipelined(width=run.width, algorithm="ring", codec=codec))
    return model.step_s(Synchronous(algorithm="ring", bucket_bytes=ONE_CALL, codec=codec))


def _stable(run: Descent, most: float) -> str:
    at_once = limit(1, run.momentum)
    kept = f"of width {run.width} and momentum {run.momentum:g} are stable below {most:.3g}"
    verdict = (
        f"lr × curvature is {run.lr:.3g}: steps diverge"
        if run.lr >= most
        else f"lr × curvature is {run.lr:.3g}, {run.lr / most:.0%} of that"
    )
    where = "" if run.problem == "quadratic" else "On a quadratic loss, a guide here: "
    return f"{where}Steps {kept} (synchronous ones below {at_once:.3g}); {verdict}."


def _recognised(runs: Mapping[str, Descent]) -> list[str]:
    shares = {name: recognised(run) for name, run in runs.items()}
    told = "; ".join(f"{name}: {percent(share)}" for name, share in shares.items() if share)
    return [f"Digits that are recognised at the end, {told}."] if told else []


def _reached(
    curves: Mapping[str, tuple[float, ...]], seconds: Mapping[str, float], goal: Goal
) -> str:
    told = []
    for name, curve in curves.items():
        steps = steps_to(curve, goal.loss)
        if steps is None:
            told.append(f"{name}: not within {len(curve) - 1} steps")
        else:
            told.append(f"{name}: {steps} steps, {milliseconds(steps * seconds[name])}")
    return f"To {goal.words} of the loss, {'; '.join(told)}."


def _by_step(
    curves: Mapping[str, tuple[float, ...]], looks: Mapping[str, tuple[str, str]]
) -> Panel:
    lines = [
        Line(name, range(len(curve)), _drawn(curve), *looks[name]) for name, curve in curves.items()
    ]
    longest = max(map(len, curves.values())) - 1
    svg = plot(lines, _steps(), _loss(), bounds=(0, max(longest, 1)), top=_top(curves))
    legend = tuple(LegendEntry(name, looks[name][0], _ended(curves[name]), looks[name][1])
                   for name in curves)  # fmt: skip
    return Panel("Loss by step", svg, "Loss by step, relative to the first.", legend)


def _by_time(
    curves: Mapping[str, tuple[float, ...]],
    seconds: Mapping[str, float],
    looks: Mapping[str, tuple[str, str]],
    goal: Goal,
) -> Panel:
    lines = [
        Line(
            name, [step * seconds[name] for step in range(len(curve))], _drawn(curve), *looks[name]
        )
        for name, curve in curves.items()
    ]
    # So long as the slowest that arrives needs, and all where none does.
    needed = [
        steps * seconds[name]
        for name, curve in curves.items()
        if (steps := steps_to(curve, goal.loss)) is not None
    ]
    whole = max((len(curve) - 1) * seconds[name] for name, curve in curves.items())
    end = min(whole, 1.3 * max(needed)) if needed else whole
    cut = [_until(line, end) for line in lines]
    svg = plot(
        cut, Scale("time", brief_seconds, log=False), _loss(), bounds=(0, end), top=_top(curves)
    )
    legend = tuple(
        LegendEntry(name, looks[name][0], f"{milliseconds(seconds[name])} a step", looks[name][1])
        for name in curves
    )
    return Panel("Loss by time", svg, "Loss by time, relative to the first.", legend)


def _limits(run: Descent) -> Panel:
    momenta = dict.fromkeys((0.0, run.momentum))
    drawn = [
        Line(
            f"momentum {momentum:g}",
            WIDTHS,
            [limit(width, momentum) for width in WIDTHS],
            *_LOOKS[index],
            dots=True,
        )
        for index, momentum in enumerate(momenta)
    ]
    drawn.append(Line("lr × curvature now", [1, 8], [run.lr, run.lr], "ink", "4 3"))
    svg = plot(
        drawn,
        Scale("pipeline width", lambda value: f"{value:g}", log=False),
        Scale("lr × curvature", lambda value: f"{value:g}"),
        marks=[Mark(run.width, f"width {run.width}")],
        bounds=(1, 8),
    )
    legend = tuple(LegendEntry(line.label, line.color, "", line.dash) for line in drawn)
    alt = "The largest stable learning rate times curvature, by pipeline width."
    return Panel("Stable below", svg, alt, legend)


def _table(run: Descent, codec: str, model: TimingModel) -> Table:
    rows, usual, goal = [], None, GOALS[run.problem]
    coded = () if run.codec is None else (run.codec,)
    for width in WIDTHS:
        for each in (None, *coded):
            one = replace(run, width=width, codec=each)
            curve, seconds = losses(one), step_s(one, model)
            steps = steps_to(curve, goal.loss)
            total = None if steps is None else steps * seconds
            usual = total if width == 1 and each is None else usual
            gain = times(usual / total) if usual and total else "–"
            rows.append(
                (
                    str(width),
                    "none" if each is None else codec,
                    f"{limit(width, run.momentum):.3g}",
                    "–" if steps is None else str(steps),
                    milliseconds(seconds),
                    "–" if total is None else milliseconds(total),
                    gain,
                )
            )
    reached = f"steps to {goal.short}", "a step", f"time to {goal.short}"
    head = ("width", "codec", "stable below", *reached, "gain")
    return Table(f"To {goal.words} of the loss", head, tuple(rows))


def _drawn(curve: Sequence[float]) -> list[float]:
    return [max(loss, _FLOOR) for loss in curve]


def _top(curves: Mapping[str, tuple[float, ...]]) -> float:
    return min(10.0, 2.0 * max(max(curve) for curve in curves.values()))


def _until(line: Line, end: float) -> Line:
    count = sum(x <= end for x in line.xs)
    return replace(line, xs=list(line.xs)[:count], ys=list(line.ys)[:count])


def _ended(curve: Sequence[float]) -> str:
    return "diverges" if curve[-1] > 1 else digits(curve[-1])


def _steps() -> Scale:
    return Scale("step", lambda value: f"{value:,.0f}", log=False)


def _loss() -> Scale:
    return Scale("loss", lambda value: f"{value:g}")
