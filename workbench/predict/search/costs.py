"""The time of each choice, such that the sum over a plan never exceeds its prediction.

    layer       seconds of the layer's forward pass
    forward     seconds of conversions and the loss, one way
    backward    seconds of all these, the other way
    gradients   seconds of the all-reduces that run beside backward
    update      seconds of the optimizer

The bytes of each choice are in `memory_limit.py`.

Ranks wait for each other, so a step takes as long as on the slowest rank, and any weighted mean
over ranks is a lower bound. Where devices differ, they are weighted by their speed: then the mean
is that of a perfectly balanced plan.

Source: the functions by which a prediction times layers, conversions and updates.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import cast

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.flow import Flow, place_weight, returned, summed_over
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Conversion, Layout, Replicate
from workbench.plan.placement.rules import cut_through, read_whole
from workbench.plan.plans.plan import BatchNorm, Plan
from workbench.predict.search.conversion_costs import (
    ConversionCosts,
    Passes,
    PassSeconds,
    passes_of,
)
from workbench.predict.search.footprint import Footprints
from workbench.predict.search.trellis import Cost, Floats, Readings
from workbench.predict.search.weight_costs import NO_WEIGHTS, WeightCost, WeightCosts
from workbench.predict.time.duration import Speeds, half_goes_back, layer_seconds, loss_seconds
from workbench.predict.time.pass_events import ADDED
from workbench.program.rows import micro_batches
from workbench.program.step import program_of

LAYER, FORWARD, BACKWARD, GRADIENTS, UPDATE = range(5)

_NOTHING = (0.0,) * 5


@dataclass(frozen=True)
class PlacedLayer:
    """One layer of a graph with its own placement, as in any plan with this choice."""

    graph: Graph
    flow: Flow
    layers: Mapping[str, LayerPlan]
    batch_norm: BatchNorm


class StepCosts:
    """The costs of one step of an experiment on a machine.

    Args:
        experiment: the experiment, for its graph, batch, optimizer and precision.
        machine: the machine, with a device for each rank.
        weights: the weight of each rank in the mean of times, with sum 1 [ranks].
    """

    def __init__(self, experiment: Experiment, machine: Machine, weights: Floats) -> None:
        plan = cast(Plan, experiment.plan)
        self.experiment, self.graph, self.world = experiment, plan.graph, plan.world_size
        self.speeds = Speeds(machine, range(self.world))
        self.weights = weights
        self.measured = any(device.samples for device in machine.devices)
        batches = micro_batches(experiment)
        self.passes = passes_of(batches)
        alone = experiment.replace(plan=Plan.data_parallel(plan.graph, self.world))
        operations = program_of(alone).operations
        self.itemsizes = {name: op.itemsize for (name, _), op in operations.by_value.items()}
        self.itemsizes |= {
            name: one.itemsize(operations.itemsize) for name, one in operations.inputs.items()
        }
        self.learns = {name for (name, _), op in operations.by_value.items() if op.needs_gradient}
        # How often a gradient comes back for a layer's output.
        self._often_read = Counter(
            name
            for layer in plan.graph.layers
            if layer.name in self.learns
            for name in layer.inputs
        )
        self.of_weights = WeightCosts(experiment, self.speeds, weights)
        # Where a parameter lies that cut operations read whole, they say: its costs are theirs.
        self._read_whole = {one.name: read_whole(plan.graph, one) for one in plan.graph.layers}
        self._placed_by_reader = {one.name for some in self._read_whole.values() for one in some}
        self._adds: dict[Hashable, float] = {}
        self._crossings: dict[Hashable, tuple[float, float]] = {}
        self._batch_norm = plan.batch_norm
        self.conversions = ConversionCosts(self.speeds, weights, self.passes)
        self.footprints = Footprints(
            experiment, self.passes[0][0], self.itemsizes, self.learns, machine
        )

    def alike(self, name: str) -> Hashable:
        """A key that is equal for layers with equal costs of every choice, and equal outputs."""
        if name in self.graph.sources:
            return name
        layer = self.graph[name]
        owner = self.graph[layer.shared] if layer.shared else layer
        learnt = (
            name in self.learns,
            self.comes_back(name),
            self._passes_on(layer),
            self._often_read[name],
        )
        kept = self.footprints.counted(layer)
        ends = name in self.graph.outputs
        own = (layer.kind, layer.target, layer.input_shape, layer.output_shape, layer.rows)
        more = (layer.groups, layer.heads, layer.flops, bool(layer.shared), layer.evaluating)
        reads = tuple(self._as_read(read) for read in layer.inputs)
        by_reader = (
            name in self._placed_by_reader,
            tuple(
                (one.kind, one.output_shape, one.name in layer.inputs, _look_of(one))
                for one in self._read_whole[name]
            ),
        )
        width = self.itemsizes.get(name)
        return own, more, _look_of(owner), reads, width, learnt, kept, ends, by_reader

    def _as_read(self, name: str) -> Hashable:
        if name in self.graph.sources:
            return self.graph.sources[name].shape, self.itemsizes[name]
        layer = self.graph[name]
        return layer.kind, layer.output_shape, layer.rows, name in self.learns

    def layer(self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout) -> Cost:
        """The cost of computing a layer, reducing its weight gradients and updating its weights."""
        alone = self.alone(layer, choice, read, given)
        forward, backward = self.computing(alone, layer, self.passes)
        of_weights = self.weights_of(layer, alone)
        for (name, _), whole in alone.flow.apart.items():
            if name in self._placed_by_reader:
                step = summed_over(whole, self.graph.shape_of(name))
                backward += self.conversions.of(step, self.itemsizes[name], True).backward
        count = sum(times for _, times in self.passes)
        backward += (count - 1) * of_weights.added
        return forward, 0.0, backward, of_weights.summed, of_weights.update

    def weights_of(self, layer: Layer, alone: PlacedLayer) -> WeightCost:
        """The cost of a layer's own weights, and of those that lie as it says."""
        own = () if layer.name in self._placed_by_reader else (layer,)
        every = (*own, *self._read_whole[layer.name])
        costs = [self.of_weights.of(one, alone.flow.weights) for one in every]
        return WeightCost(*(sum(column) for column in zip(NO_WEIGHTS, *costs, strict=True)))

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost:
        """The cost of an input that is read in another layout: none, its value has that."""
        return _NOTHING

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """The cost of a layer's output: its conversions, and the loss if the model returns it."""
        _, per_sample = self.shape(name)
        if per_sample == 0:
            return _NOTHING
        forward, backward = self._crossed(name, source, readings, carried)
        if name in self.graph.outputs:
            loss = self.loss(name, source, self.passes)
            forward, backward = forward + loss, backward + loss
        backward += self.added(name, source, readings)
        return 0.0, forward, backward, 0.0, 0.0

    def _crossed(
        self, name: str, source: Layout, readings: Readings, carried: bool
    ) -> tuple[float, float]:
        """(forward, backward) seconds of a value's conversions, known for equal shapes."""
        width, learns = self.itemsizes[name], self.comes_back(name)
        ends = name in self.graph.outputs
        key = (source, readings, carried, *self.shape(name), width, learns, ends)
        known = self._crossings.get(key)
        if known is None:
            forward = backward = 0.0
            for step in self.steps(name, source, readings, carried):
                crossed = self.conversions.of(step, width, learns)
                forward, backward = forward + crossed.forward, backward + crossed.backward
            known = self._crossings[key] = forward, backward
        return known

    def comes_back(self, name: str) -> bool:
        """Whether a gradient comes back from all readers of a value."""
        return name in self.learns and self.learns.issuperset(self.graph.consumers[name])

    def alone(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> PlacedLayer:
        """The placement of this layer by itself."""
        choices = {} if choice is None else {layer.name: choice}
        owner = self.graph[layer.shared] if layer.shared else layer
        users = (layer,) if owner is layer else (owner, layer)  # which may have a bias of its own
        placed = {w.name: place_weight(one, w, read, choices) for one in users for w in one.weights}
        free = [layer] if choice is None or choice.group_size == 1 else []
        cut = cut_through(self.graph, free, {layer.name: read})
        whole = Layout(read.group_size, Replicate()) if layer.name in cut[0] else ROWS
        for one in self._read_whole[layer.name]:
            placed |= {w.name: place_weight(one, w, whole, {}) for w in one.weights}
        flow = Flow({layer.name: read}, {layer.name: given}, {}, {}, placed, *cut)
        return PlacedLayer(self.graph, flow, choices, self._batch_norm)

    def shape(self, name: str) -> tuple[tuple[int, ...], int]:
        """(the shape of one sample, the rows for each sample) of a value."""
        return self.graph.shape_of(name), self.graph.rows_of(name)

    def steps(
        self, name: str, source: Layout, readings: Readings, carried: bool
    ) -> list[Conversion]:
        """The conversions of a value."""
        read = frozenset[tuple[Layout, bool]]() if carried else readings
        ends = returned(self.graph, name, source) if name in self.graph.outputs else None
        return self.conversions.steps(source, read, *self.shape(name), ends)

    def computing(self, alone: PlacedLayer, layer: Layer, passes: Passes) -> PassSeconds:
        """Seconds of a layer in these passes, the mean over ranks."""
        forward = backward = 0.0
        if layer.kind in ("size", "parameter"):
            return PassSeconds(forward, backward)
        for rows, times in passes:
            found = layer_seconds(alone, layer, rows, self.experiment.precision, self.speeds)
            forward += times * self._mean(found.forward)
            half = found.estimated and half_goes_back(self.graph, layer, self._passes_on(layer))
            backward += times * self._mean(found.backward) * (0.5 if half else 1.0)
        return PassSeconds(forward, backward * (layer.name in self.learns))

    def loss(self, name: str, source: Layout, passes: Passes) -> float:
        """Seconds of the loss of a model's output, each way, the mean over ranks."""
        total, (shape, per_sample) = 0.0, self.shape(name)
        layout = returned(self.graph, name, source)
        for rows, times in passes:
            logits = rows.elements(layout, shape, per_sample) * self.itemsizes[name]
            total += times * self._mean(loss_seconds(logits, self.speeds))
        return total

    def _passes_on(self, layer: Layer) -> bool:
        """Whether a gradient flows from a layer to its inputs."""
        return not self.learns.isdisjoint(layer.inputs)

    def added(self, name: str, source: Layout, readings: Readings) -> float:
        """Seconds to add up the gradients of a value's readers, in the cheapest of its layouts."""
        more = self._often_read[name] - 1
        if more < 1 or name not in self.learns or self.measured:
            return 0.0  # measured layers have it in their times
        layouts = {source, *(layout for layout, _ in readings)}
        shape, per_sample = self.shape(name)
        width = self.itemsizes[name]
        return min(self._adding(layout, shape, per_sample, width, more) for layout in layouts)

    def _adding(
        self, layout: Layout, shape: tuple[int, ...], per_sample: int, width: int, more: int
    ) -> float:
        key = (layout, shape, per_sample, width, more)
        if key not in self._adds:
            self._adds[key] = 0.0
            for rows, times in self.passes:
                size = rows.elements(layout, shape, per_sample) * (ADDED * more * width)
                self._adds[key] += times * self._mean(self.speeds.streaming(size, more))
        return self._adds[key]

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def _look_of(layer: Layer) -> Hashable:
    """What the costs of a layer's weights depend on."""
    return tuple((w.shape, w.dtype, w.trainable) for w in layer.weights)
