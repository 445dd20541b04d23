"""What the staleness explorer draws: loss by step and by time, and which steps are stable."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.plan.codec import Codec
from workbench.plan.stability import limit
from workbench.plan.sync import Pipelined, Synchronous
from workbench.predict.timing import TimingModel
from workbench.widgets.explorers.descent import Descent, losses, recognised, steps_to
from workbench.widgets.explorers.picture import Entry, Panel, Picture, Table
from workbench.widgets.explorers.plot import Line, Mark, Scale, plot
from workbench.widgets.explorers.problems import GOALS, Goal
from workbench.widgets.explorers.reading import brief_seconds, times
from workbench.widgets.explorers.timing_picture import ONE_CALL
from workbench.widgets.units import digits, milliseconds, percent

WIDTHS = (1, 2, 3, 4, 6, 8)
_LOOKS = (("blue", ""), ("vermilion", "7 3"), ("green", ""), ("purple", "2 3"))
_FLOOR = 1e-7


def of(run: Descent, codec: str, model: TimingModel) -> Picture:
    """The picture of a run, beside those without what it has.

    Args:
        run: late, coarse, or both.
        codec: its codec as it is called.
        model: what a step takes.

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
    legend = tuple(Entry(name, looks[name][0], _ended(curves[name]), looks[name][1])
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
        Entry(name, looks[name][0], f"{milliseconds(seconds[name])} a step", looks[name][1])
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
    legend = tuple(Entry(line.label, line.colour, "", line.dash) for line in drawn)
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
