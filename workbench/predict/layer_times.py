"""Seconds of layers, asked for once for all that are alike: deep models repeat their blocks."""

import math
from collections.abc import Hashable

from workbench.plan.graph import Layer
from workbench.plan.plan import Plan
from workbench.predict.duration import LayerSeconds, Speeds, layer_seconds
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
        self._looks: dict[str, Hashable] = {}
        self._known: dict[tuple[Hashable, int], LayerSeconds] = {}

    def of(self, layer: Layer, rows: Rows) -> LayerSeconds:
        """Forward and backward pass of one layer of a pass.

        Args:
            layer: of the plan's graph.
            rows: of the pass; those of a pass are one object.
        """
        look = self._looks.get(layer.name)
        if look is None:
            look = self._looks[layer.name] = self._look(layer)
        found = self._known.get((look, id(rows)))
        if found is None:
            found = layer_seconds(self.plan, layer, rows, self.precision, self.speeds)
            self._known[look, id(rows)] = found
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

    def _look(self, layer: Layer) -> Hashable:
        """Equal for layers that take equally long."""
        graph, flow = self.plan.graph, self.plan.flow
        owner = graph[layer.shared] if layer.shared else layer
        reads = [graph[name] for name in layer.inputs if name != "input"]
        return (
            layer.kind,
            layer.target,
            layer.output_shape,
            layer.rows,
            layer.flops,
            layer.groups,
            layer.heads,
            id(flow.inputs[layer.name]),  # most are one and the same, and slow to hash
            id(flow.outputs[layer.name]),
            self.plan.layers.get(layer.name),
            tuple([weight.shape for weight in owner.weights]),
            tuple([(read.kind, read.output_shape, read.rows) for read in reads]),
            layer.inputs.index("input") if "input" in layer.inputs else -1,
        )
