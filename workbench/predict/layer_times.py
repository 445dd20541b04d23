"""Seconds of layers, asked for once for all that are alike: deep models repeat their blocks."""

import math

from workbench.plan.graph import Layer
from workbench.plan.plan import Plan
from workbench.predict.duration import LayerSeconds, Speeds, layer_seconds
from workbench.predict.program import Operation
from workbench.predict.rows import Rows


class LayerTimes:
    """The layers of a plan, and how well their times are known.

    Args:
        plan: that places them.
        precision: of the experiment.
        speeds: of the ranks.

    Attributes:
        estimated: layers of shapes that the machine has not measured.
    """

    def __init__(self, plan: Plan, precision: str, speeds: Speeds) -> None:
        self.plan, self.precision, self.speeds = plan, precision, speeds
        self.estimated: dict[str, None] = {}
        self._seconds = self._squared = self._guessed = 0.0
        self._known: dict[tuple[int, Rows], LayerSeconds] = {}

    def of(self, operation: Operation, layer: Layer, rows: Rows) -> LayerSeconds:
        """Forward and backward pass of one layer of a pass.

        Args:
            operation: that runs it.
            layer: of the plan's graph.
            rows: of the pass; those of a pass are one object.
        """
        found = self._known.get((operation.look, rows))
        if found is None:
            found = layer_seconds(self.plan, layer, rows, self.precision, self.speeds)
            self._known[operation.look, rows] = found
        self._seconds += found.total
        if found.estimated:
            self.estimated.setdefault(layer.name)
            self._guessed += found.weighed
        else:
            self._squared += found.weighed**2
        return found

    @property
    def error(self) -> float:
        """Relative half width of the band around all of them.

        Measurements are wrong independently of each other; estimates, all in one direction.
        """
        if self._seconds == 0:
            return 0.0
        return (math.sqrt(self._squared) + self._guessed) / self._seconds
