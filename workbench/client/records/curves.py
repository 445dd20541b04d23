"""How runs learned, and what they took, as panels of a picture that needs no kernel."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.plan.display.panels import COLORS, Axis, Bar, Curve, Panel, bar_panel, line_panel
from workbench.plan.io.units import digits, milliseconds, percent, shortened, size

if TYPE_CHECKING:
    import pandas

MOST_POINTS = 500  # of a curve: more cannot be told apart, and would make a large file
_LETTER, _BESIDE = 7, 14  # pixels of a letter in a legend; letters of a value and its square
COMPUTE, COMMUNICATION, WAIT = "#009E73", "#E69F00", "#9aa0a6"


def loss_panel(metrics: Mapping[str, "pandas.DataFrame"], *, width: int = 470) -> Panel:
    """The loss of each run by the steps made.

    Args:
        metrics: the metrics of each run, by its name.
        width: in pixels, before it is scaled.
    """
    curves = [
        Curve(name, xs, ys, color, digits(ys[-1]) if ys else "")
        for name, color, xs, ys in _colored(metrics, "loss", width)
    ]
    return line_panel("Loss by step", curves, Axis("loss"), width=width)


def figure_panels(
    evaluations: Mapping[str, "pandas.DataFrame"], *, width: int = 470
) -> list[Panel]:
    """What was measured on the test split besides the loss: a panel for each figure.

    Args:
        evaluations: `run.evaluations` of each run, by its name.
        width: in pixels, before it is scaled.
    """
    columns = dict.fromkeys(str(name) for each in evaluations.values() for name in each)
    return [_figure(name, evaluations, width) for name in columns if name not in ("done", "loss")]


def _figure(figure: str, evaluations: Mapping[str, "pandas.DataFrame"], width: int) -> Panel:
    is_share = figure == "accuracy"
    rows = {
        name: each.reindex(columns=["done", figure]).assign(step=each["done"] - 1, rank=0)
        for name, each in evaluations.items()
    }
    curves = [
        Curve(
            name, xs, ys, color, (percent if is_share else digits)(ys[-1]) if ys else "", dots=True
        )
        for name, color, xs, ys in _colored(rows, figure, width)
    ]
    axis = Axis("test accuracy (%)", top=1.0, scale=100.0) if is_share else Axis(f"test {figure}")
    return line_panel(f"{figure[:1].upper()}{figure[1:]} by step", curves, axis, width=width)


def speed_panel(metrics: "pandas.DataFrame") -> Panel:
    """The samples per second of a whole run."""
    xs, ys = _series(metrics, "samples_per_s")
    now = digits(ys[-1]) if ys else ""
    curve = Curve("samples/s", xs, ys, COMPUTE, now, fill=True)
    return line_panel("Throughput by step", [curve], Axis("samples/s"))


def time_panel(metrics: "pandas.DataFrame") -> Panel:
    """What a step takes on each rank, in the median over steps."""
    columns = ["compute_s", "communication_s", "wait_s"]
    found = metrics.groupby("rank")[columns].median()
    bars = [
        Bar(f"rank {int(rank)}", tuple(map(float, row)), milliseconds(float(sum(row))))
        for rank, row in zip(found.index, found.to_numpy(), strict=True)
    ]
    names = (("compute", COMPUTE), ("communication", COMMUNICATION), ("wait", WAIT))
    legend = tuple((color, name, "") for name, color in names)
    return bar_panel("Time of a step per rank, median", bars, legend)


def memory_panel(metrics: "pandas.DataFrame") -> Panel:
    """The most memory that the tensors of each rank took."""
    found = metrics.groupby("rank")["peak_bytes"].max()
    bars = [Bar(f"rank {int(rank)}", (float(n),), size(float(n))) for rank, n in found.items()]  # type: ignore[call-overload]
    return bar_panel("Peak memory of tensors per rank", bars, ((COLORS[1], "peak", ""),))


def _colored(
    metrics: Mapping[str, "pandas.DataFrame"], column: str, width: int
) -> list[tuple[str, str, list[float], list[float]]]:
    """The name, as far as the legend has room for all of them, the color and the points of each."""
    room = max(8, width // max(1, len(metrics)) // _LETTER - _BESIDE)
    return [
        (shortened(name, room), COLORS[index % len(COLORS)], *_series(each, column))
        for index, (name, each) in enumerate(metrics.items())
    ]


def _series(metrics: "pandas.DataFrame", column: str) -> tuple[list[float], list[float]]:
    """Steps made, and what rank 0 reported after them, where it did."""
    rows = metrics[(metrics["rank"] == 0) & metrics[column].notna()]
    stride = max(1, math.ceil(len(rows) / MOST_POINTS))
    kept = rows.iloc[::-stride].iloc[::-1]  # the last one is always there
    return [float(step) + 1 for step in kept["step"]], [float(y) for y in kept[column]]
