"""Test accuracy by step of several runs, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.client.run.run import Run
from workbench.widgets.charts import Axis, Curve, document, image, line_panel
from workbench.widgets.timing_chart import COLOURS


@dataclass(frozen=True)
class AccuracyChart:
    """What runs had learnt at each of their evaluations.

    Attributes:
        runs: by name, of the same task.
    """

    runs: Mapping[str, Run]

    def svg(self) -> str:
        """The chart as a document of its own."""
        curves = []
        for index, (name, run) in enumerate(self.runs.items()):
            steps, accuracies = _measured(run)
            last = f"{100 * accuracies[-1]:.1f} %" if accuracies else "–"
            colour = COLOURS[index % len(COLOURS)]
            curves.append(Curve(name, steps, accuracies, colour, last, dots=True))
        axis = Axis("test accuracy (%)", top=1.0, scale=100.0)
        return document([line_panel("Accuracy by step", curves, axis, width=860)], columns=1)

    def __repr__(self) -> str:
        lines = ["<AccuracyChart: at the end>"]
        for name, run in self.runs.items():
            _, accuracies = _measured(run)
            lines.append(f"{name}: {accuracies[-1]:.1%}" if accuracies else f"{name}: not measured")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return image(self.svg(), repr(self))


def _measured(run: Run) -> tuple[list[float], list[float]]:
    """Steps made, and the accuracy after them."""
    rows = run.metrics.query("rank == 0 and accuracy == accuracy")
    return [float(step) + 1 for step in rows["step"]], list(map(float, rows["accuracy"]))
