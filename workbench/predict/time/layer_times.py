"""Seconds of layers, asked for once for all that are alike: deep models repeat their blocks."""

import math
from dataclasses import dataclass

from workbench.plan.graph import Layer
from workbench.plan.plan import Plan
from workbench.predict.time.duration import LayerSeconds, Speeds, layer_seconds
from workbench.program.operations import Operation
from workbench.program.rows import Rows


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
        self._known: dict[tuple[int, Rows], _Times] = {}

    def of(self, operation: Operation, layer: Layer, rows: Rows) -> LayerSeconds:
        """Forward and backward pass of one layer of a pass, which is told once in each pass.

        Args:
            operation: that runs it.
            layer: of the plan's graph.
            rows: of the pass; those of a pass are one object.
        """
        key = operation.look, rows
        known = self._known.get(key)
        if known is None:
            found = layer_seconds(self.plan, layer, rows, self.precision, self.speeds)
            known = self._known[key] = _Times(found)
        known.often += 1
        if known.seconds.estimated:
            self.estimated.setdefault(layer.name)
        return known.seconds

    @property
    def error(self) -> float:
        """Relative half width of the band around all of them.

        Measurements are wrong independently of each other; estimates, all in one direction.
        """
        seconds = squared = guessed = 0.0
        for known in self._known.values():
            found = known.seconds
            seconds += known.often * found.total
            if found.estimated:
                guessed += known.often * found.weighed
            else:
                squared += known.often * found.weighed**2
        return (math.sqrt(squared) + guessed) / seconds if seconds else 0.0


@dataclass
class _Times:
    """What layers that are alike take, and how many of them there are."""

    seconds: LayerSeconds
    often: int = 0
