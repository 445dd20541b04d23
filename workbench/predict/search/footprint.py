"""The bytes that a layer saves for its backward pass, and those that it needs there.

All are means over ranks: no rank's peak can be below the mean, so their sums are lower bounds of
the prediction. Views, and values that no gradient reaches, are not counted. A rank without a piece
of a layer saves less, which is not subtracted: the first rank of a group is never one.

Source: the functions by which a prediction writes down a step's tensors (`execution.py`).
"""

from collections.abc import Mapping

import numpy as np

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import PlacedLayers
from workbench.plan.placement.flow import WeightPlacement, heads_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Layout
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.kept import Windows, saved_by
from workbench.predict.memory.workspaces import (
    NO_WORKSPACE,
    Sizes,
    Workspace,
    Workspaces,
    attention,
)
from workbench.predict.search.trellis import Floats
from workbench.program.buckets import KEEPS_GRADIENT_BYTES, itemsize, piece
from workbench.program.operations import HALF, computes_in_half
from workbench.program.rows import Counts, Rows, tiled

SLOTS = 2  # of the values that a layer reads, so many are looked at

Footprint = tuple[float, ...]


class Footprints:
    """The memory of any layer of an experiment's graph.

    Args:
        experiment: the experiment, for its graph and precision.
        itemsizes: the bytes of an element of each layer's output.
        machine: the machine, for the workspace of its devices' kernels.
    """

    def __init__(
        self,
        experiment: Experiment,
        rows: Rows,
        itemsizes: Mapping[str, int],
        learns: set[str],
        machine: Machine,
    ) -> None:
        plan: Plan = experiment.plan
        self.graph: Graph = plan.graph
        self.rows, self.itemsizes, self.learns = rows, itemsizes, learns
        self.precision, self.half = experiment.precision, experiment.half
        self.workspaces = Workspaces(machine, range(rows.world_size), experiment.precision)
        sync = experiment.sync
        self.rewrites = not self.half and not sync.timing.of_weights
        self.kept = {layer.name: saved_by(plan, layer) for layer in self.graph.layers}

    def of(
        self,
        layer: Layer,
        choice: LayerPlan | None,
        read: Layout,
        given: Layout,
        alone: PlacedLayers,
    ) -> Footprint:
        """The bytes that one layer saves and needs.

        They are the columns from `BESIDE` to `MADE` of `memory_costs.py`.

        Args:
            choice: the layer's choice; None: it has none.
        """
        if layer.name not in self.learns or layer.kind in ("parameter", "size"):
            return (0.0,) * (3 + SLOTS)
        output = self._bytes(layer.name, given).mean() if self.gives(layer.name) else 0.0
        slots = [self.read(layer, name, read) for name in self.slots(layer)]
        slots += [0.0] * (SLOTS - len(slots))
        beside = self._beside(layer, choice, given)
        transient = self._transient(layer, choice, read, given, alone)
        return beside, float(output), *slots, transient

    def slots(self, layer: Layer) -> list[str]:
        """The inputs of a layer that can be saved for it or others, at most `SLOTS`."""
        found = [name for name in dict.fromkeys(layer.inputs) if self.counts(self.root(name))]
        return found[:SLOTS]

    def roots(self, layer: Layer) -> list[str]:
        """The values whose memory the `slots` of a layer are."""
        return [self.root(name) for name in self.slots(layer)]

    def root(self, name: str) -> str:
        """The value whose memory this one is a view of: itself, if it is no view."""
        while name not in self.graph.sources and self.kept[name].view and self.graph[name].inputs:
            name = self.graph[name].inputs[0]
        return name

    def gives(self, name: str) -> bool:
        """Whether a layer saves its own output."""
        return self.counts(name) and self.kept[name].output

    def needs(self, layer: Layer) -> list[bool]:
        """Whether the layer saves each of its `slots`."""
        slots = self.slots(layer)
        if layer.name not in self.learns or not self.kept[layer.name].input:
            return [False] * len(slots)
        if layer.saved is not None:
            kept = {layer.inputs[place] for place in layer.saved.inputs}
            return [name in kept for name in slots]
        read = list(dict.fromkeys(layer.inputs))
        if layer.kind == "mul" and len(read) == 2:  # a factor is kept for the other's gradient
            return [read[1 - read.index(name)] in self.learns for name in slots]
        return [True] * len(slots)

    def counted(self, layer: Layer) -> tuple[bool, tuple[bool, ...], tuple[int, ...]]:
        """A key that is equal for layers of which the same values are counted."""
        places = tuple(layer.inputs.index(name) for name in self.slots(layer))
        return self.gives(layer.name), tuple(self.needs(layer)), places

    def counts(self, name: str) -> bool:
        """Whether a value is counted: it has its own memory, and a gradient reaches it."""
        if name in self.graph.sources or name not in self.learns or self.graph[name].rows == 0:
            return False
        return not self.kept[name].view

    def read(self, layer: Layer, name: str, read: Layout) -> float:
        """Bytes of a value as a layer reads and saves it."""
        casts = self.half and computes_in_half(layer)
        width = self.itemsizes[name]
        share = min(width, HALF) / width if casts else 1.0
        return float(self._bytes(name, read).mean()) * share

    def _beside(self, layer: Layer, choice: LayerPlan | None, given: Layout) -> float:
        """Bytes of masks, indices and other tensors that a layer makes to save."""
        keeps = self.kept[layer.name]
        heads = self._heads(layer, choice)
        share = 1.0 if heads is None else float(heads.mean())
        each = keeps.beside(self.itemsizes[layer.name], share)
        elements = self.rows.elements(given, layer.output_shape, layer.rows)
        return each * float(elements.mean()) if each else 0.0

    def _transient(
        self,
        layer: Layer,
        choice: LayerPlan | None,
        read: Layout,
        given: Layout,
        alone: PlacedLayers,
    ) -> float:
        """The bytes of gradients and workspace that are alive in its backward pass alone."""
        placed = alone.flow.weights
        arrived = self._bytes(layer.name, given).astype(np.float64)
        if layer.rows == 0:
            return 0.0
        if self.kept[layer.name].passes:
            return float(arrived.mean())
        wanted = [n for n in dict.fromkeys(layer.inputs) if n in self.learns and self._rows(n)]
        made = np.zeros(len(arrived))
        for name in wanted:
            made = made + self._bytes(name, read)
        space = self._workspace(layer, choice, read, given, alone)
        later = made + np.maximum(
            _or_none(space.beside_gradient) if wanted else 0.0, _or_none(space.of_weight)
        )
        before = _or_none(space.backward) if wanted else 0.0
        beside_made = arrived + made + _or_none(space.beside_weights)
        room = np.maximum(arrived + np.maximum(before, later), beside_made)
        return float(np.maximum(room, beside_made + self._made(layer, placed)).mean())

    def _made(self, layer: Layer, placed: Mapping[str, WeightPlacement]) -> Floats:
        """Bytes of its weights' gradients on each rank [ranks]."""
        made = np.zeros(self.rows.world_size)
        for index, weight in enumerate(layer.weights):
            if not weight.trainable:
                continue
            where = placed[weight.name]
            size = piece(where, self.rows.world_size) * itemsize(where, self.precision)
            rewritten = self.rewrites and layer.kind == "linear" and index == 0
            made = made + size * ((size < KEEPS_GRADIENT_BYTES) | (not rewritten))
        return made

    def _workspace(
        self,
        layer: Layer,
        choice: LayerPlan | None,
        read: Layout,
        given: Layout,
        alone: PlacedLayers,
    ) -> Workspace:
        if layer.kind == "conv2d" and layer.weights:
            where, width = alone.flow.weights[layer.weights[0].name], self.itemsizes[layer.name]
            world = self.rows.world_size
            weight = piece(where, world) * itemsize(where, self.precision)
            whole = itemsize(where, self.precision)
            x = self.rows.elements(read, layer.input_shape, layer.rows) * width
            sizes = Sizes(x, weight * width // whole, self._bytes(layer.name, given), width)
            return self.workspaces.of_convolution(alone, layer, self.rows, sizes)
        if layer.kind == "linear" and layer.weights:
            elements = self.rows.elements(given, layer.output_shape, layer.rows)
            return self.workspaces.of_linear(alone, layer, self.rows, elements)
        if layer.kind == "attention":
            size, windows = self._bytes(layer.name, given), Windows.of(layer)
            heads = self._heads(layer, choice)
            if windows is not None:
                return windows.workspace(size, 1.0 if heads is None else heads)
            return attention(size, heads)
        return NO_WORKSPACE

    def _heads(self, layer: Layer, choice: LayerPlan | None) -> np.ndarray | None:
        """The fraction of an attention layer's heads on each rank [ranks]; None: all."""
        heads = heads_of(layer, choice)
        return None if heads is None else tiled(heads, self.rows.world_size) / layer.heads

    def _rows(self, name: str) -> bool:
        return self.graph[name].rows > 0

    def _bytes(self, name: str, layout: Layout) -> Counts:
        layer = self.graph[name]
        elements = self.rows.elements(layout, layer.output_shape, layer.rows)
        return elements * self.itemsizes[name]


def _or_none(size: Counts | None) -> Counts | float:
    return 0.0 if size is None else size
