"""What each choice costs, so that the sum over a plan never exceeds what is predicted for it.

    layer       seconds of the layer's forward pass
    forward     seconds of conversions and the loss, one way
    gather      of these, seconds of gathers that could run beside a tail in rounds
    backward    seconds of all these, the other way
    gradients   seconds of the all-reduces that go on beside backward
    update      seconds of the optimizer
    resident    bytes of parameters and buffers, gradients that stay, and the optimizer's state
    kept        bytes that layers keep from their forward pass for their backward pass; they are
                all there at once when the forward pass of a micro-batch has ended

What several layers keep of one value is counted for one of them: the layer that gave it, if it
keeps it, else the first that does.

Ranks wait for each other, so that a step takes as long as on the slowest; any weighted mean over
ranks is a lower bound of that. Where devices differ, they are weighted with their speed: then
the mean is that of a perfectly balanced plan.

Source: the functions by which a prediction times layers, conversions and updates.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from workbench.plan.choice import LayerPlan
from workbench.plan.experiment import Experiment
from workbench.plan.flow import Flow
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.plan.machine import Machine
from workbench.plan.plan import BatchNorm, Plan
from workbench.plan.routing import crossings, returned
from workbench.plan.tail import mixes_rows
from workbench.plan.weights import heads_of, place_weight
from workbench.predict.batches import micro_batches
from workbench.predict.duration import (
    Speeds,
    conversion_seconds,
    layer_seconds,
    loss_seconds,
)
from workbench.predict.kept import kept_by
from workbench.predict.pass_events import ADDED
from workbench.predict.program import HALF, program_of
from workbench.predict.rows import Rows, tiled
from workbench.predict.search.trellis import Cost, Floats, Readings
from workbench.predict.search.weight_costs import WeightCosts

LAYER, FORWARD, GATHER, BACKWARD, GRADIENTS, UPDATE, RESIDENT, KEPT = range(8)
_NOTHING = (0.0,) * 8


@dataclass(frozen=True)
class _Alone:
    """One layer as if it were placed by a plan: what `layer_seconds` reads of one."""

    graph: Graph
    flow: Flow
    layers: MappingProxyType[str, LayerPlan]
    batch_norm: BatchNorm


class StepCosts:
    """Costs of one step of an experiment on a machine.

    Args:
        experiment: whose graph, batch, optimizer and precision count.
        machine: with devices for its ranks.
        weights: of each rank in the mean of times, with sum 1.
    """

    def __init__(self, experiment: Experiment, machine: Machine, weights: Floats) -> None:
        plan = cast(Plan, experiment.plan)
        self.experiment, self.graph, self.world = experiment, plan.graph, plan.world_size
        self.speeds = Speeds(machine, range(self.world))
        self.weights = weights
        self.measured = any(device.samples for device in machine.devices)
        batches = micro_batches(experiment)
        self.passes = [(Rows(rows), batches.count(rows)) for rows in dict.fromkeys(batches)]
        alone = experiment.replace(plan=Plan.data_parallel(plan.graph, self.world))
        program = program_of(alone)
        self.itemsizes = {name: op.itemsize for (name, _), op in program.by_value.items()}
        self.itemsizes["input"] = program.itemsize
        self.learns = {name for (name, _), op in program.by_value.items() if op.needs_gradient}
        self.of_weights = WeightCosts(experiment, self.speeds, weights)
        self.tailable = _tailable(plan.graph)
        self.before_tails = {
            name
            for name, readers in plan.graph.consumers.items()
            if all(reader in self.tailable for reader in readers)
        }
        self._adds: dict[Hashable, float] = {}
        self._crossed: dict[tuple[Conversion, int, bool], tuple[float, float]] = {}
        self._batch_norm = plan.batch_norm
        self._kept = {
            layer.name: kept_by(layer, plan.batch_norm == "synchronized")
            for layer in plan.graph.layers
        }

    def alike(self, name: str) -> Hashable:
        """Equal for layers that cost the same in every choice, and so do their outputs."""
        if name == "input":
            return name
        layer = self.graph[name]
        owner = self.graph[layer.shared] if layer.shared else layer
        learnt = (
            name in self.learns,
            self._passes_on(layer),
            self._readers(name),
            self._keeps_of(layer)[0],
        )
        kept = len(self._keeps_of(layer)[1])
        ends = (name in self.graph.outputs, name in self.before_tails)
        weights = tuple((w.shape, w.dtype, w.trainable) for w in owner.weights)
        own = (layer.kind, layer.target, layer.input_shape, layer.output_shape, layer.rows)
        more = (layer.groups, layer.heads, layer.flops, bool(layer.shared))
        reads = tuple(self._as_read(read) for read in layer.inputs)
        return own, more, weights, reads, self.itemsizes.get(name), learnt, kept, ends

    def _as_read(self, name: str) -> Hashable:
        if name == "input":
            return self.graph.input_shape
        layer = self.graph[name]
        return layer.kind, layer.output_shape, layer.rows, name in self.learns

    def layer(self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout) -> Cost:
        """Of computing a layer, holding its weights, summing their gradients and updating them."""
        choices = {} if choice is None else {layer.name: choice}
        owner = self.graph[layer.shared] if layer.shared else layer
        placed = {w.name: place_weight(owner, w, read, choices) for w in owner.weights}
        flow = Flow({layer.name: read}, {layer.name: given}, {}, {}, placed)
        stands = _Alone(self.graph, flow, MappingProxyType(choices), self._batch_norm)
        alone = cast(Plan, stands)
        forward = backward = 0.0
        if layer.kind not in ("size", "parameter"):
            for rows, times in self.passes:
                found = layer_seconds(alone, layer, rows, self.experiment.precision, self.speeds)
                forward += times * self._mean(found.forward)
                half = found.estimated and not self._passes_on(layer)  # the weights' gradient
                backward += times * self._mean(found.backward) * (0.5 if half else 1.0)
        backward *= layer.name in self.learns
        summed, update, resident = self.of_weights.of(layer, placed)
        kept = self._kept_beside(layer, choice, given) + self._kept_values(layer, read, given)
        return forward, 0.0, 0.0, backward, summed, update, resident, kept

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """Of a layer's output: its conversions, and the loss where the model returns it."""
        if name == "input":
            shape, per_sample = self.graph.input_shape, 1
        else:
            shape, per_sample = self.graph[name].output_shape, self.graph[name].rows
        if per_sample == 0:
            return _NOTHING
        forward = gather = backward = 0.0
        for step in self._steps(name, source, readings, carried, shape, per_sample):
            there, back = self._crossing(step, self.itemsizes[name], name in self.learns)
            forward, backward = forward + there, backward + back
            if step.source == ROWS and name in self.before_tails:
                gather += there
        if name in self.graph.outputs:
            for rows, times in self.passes:
                logits = rows.elements(returned(source, shape), shape, per_sample)
                size = logits * self.itemsizes[name]
                seconds = times * self._mean(loss_seconds(size, self.speeds))
                forward, backward = forward + seconds, backward + seconds
        backward += self._added(name, source, readings, shape, per_sample)
        return 0.0, forward, gather, backward, 0.0, 0.0, 0.0, 0.0

    def _passes_on(self, layer: Layer) -> bool:
        """Whether a gradient goes on from a layer to what it reads."""
        return not self.learns.isdisjoint(layer.inputs)

    def _readers(self, name: str) -> int:
        """How often a gradient comes back for a layer's output."""
        readers = (r for r in self.graph.consumers[name] if r in self.learns)
        return sum(self.graph[reader].inputs.count(name) for reader in readers)

    def _added(
        self,
        name: str,
        source: Layout,
        readings: Readings,
        shape: tuple[int, ...],
        per_sample: int,
    ) -> float:
        """Seconds to add up what comes back from several readers, where it is smallest."""
        more = self._readers(name) - 1
        if more < 1 or name not in self.learns or self.measured:
            return 0.0  # measured layers have it in their times
        layouts = {source, *(layout for layout, _ in readings)}
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

    def _steps(
        self,
        name: str,
        source: Layout,
        readings: Readings,
        carried: bool,
        shape: tuple[int, ...],
        per_sample: int,
    ) -> list[Conversion]:
        """The conversions of a value; readers whose conversions start alike share them."""
        chains: list[tuple[Conversion, ...]] = []
        for target in {layout for layout, _ in readings}:
            summands = [sums for layout, sums in readings if layout == target]
            if not carried:
                chains += crossings(source, target, summands, shape, per_sample)
        if name in self.graph.outputs:
            chains += crossings(source, returned(source, shape), [False], shape, per_sample)
        prefixes = {chain[: end + 1] for chain in chains for end in range(len(chain))}
        return [prefix[-1] for prefix in prefixes]

    def _crossing(self, step: Conversion, width: int, learns: bool) -> tuple[float, float]:
        known = self._crossed.get((step, width, learns))
        if known is None:
            forward = backward = 0.0
            for rows, times in self.passes:
                crossed = conversion_seconds(step, rows, width, self.speeds)
                forward += times * self._mean(crossed.forward_s)
                if crossed.forward is not None:
                    forward += times * self._mean(crossed.forward.seconds)
                if learns:
                    backward += times * self._mean(crossed.backward_s)
                if learns and crossed.backward is not None:
                    backward += times * self._mean(crossed.backward.seconds)
            known = self._crossed[step, width, learns] = forward, backward
        return known

    def _kept_beside(self, layer: Layer, choice: LayerPlan | None, given: Layout) -> float:
        """Bytes of masks, places and what else a layer keeps of its own."""
        keeps = self._kept[layer.name]
        if layer.name not in self.learns:
            return 0.0
        words = keeps.words + keeps.of_heads
        if choice is not None and choice.scheme == "shard_heads":
            share = tiled(heads_of(layer, choice), self.world) / layer.heads
            words = keeps.words + keeps.of_heads * float(share.mean())
        each = words * self.itemsizes[layer.name] + keeps.bytes
        return each * self._elements(given, layer.output_shape, layer.rows) if each else 0.0

    def _keeps_of(self, layer: Layer) -> tuple[bool, tuple[str, ...]]:
        """(whether its output counts for a layer, those of its inputs that do)."""
        if layer.name not in self.learns or layer.kind in ("parameter", "size"):
            return False, ()
        keeps = self._kept[layer.name]
        inputs = [name for name in dict.fromkeys(layer.inputs) if keeps.input]
        if layer.kind == "mul" and len(inputs) == 2:  # a factor is kept for the other's gradient
            inputs = [a for a, b in zip(inputs, inputs[::-1], strict=True) if b in self.learns]
        return keeps.output and not keeps.view, tuple(filter(self._is_first(layer), inputs))

    def _is_first(self, layer: Layer) -> Callable[[str], bool]:
        def first(name: str) -> bool:
            if name == "input" or name not in self.learns:
                return False
            above = self._kept[name]
            if above.output or above.view or self.graph[name].rows == 0:
                return False
            readers = (r for r in self.graph.consumers[name] if r in self.learns)
            return next((r for r in readers if self._kept[r].input), None) == layer.name

        return first

    def _kept_values(self, layer: Layer, read: Layout, given: Layout) -> float:
        """Bytes of the values that are kept and count for this layer."""
        output, inputs = self._keeps_of(layer)
        total = 0.0
        if output:
            elements = self._elements(given, layer.output_shape, layer.rows)
            total += elements * self.itemsizes[layer.name]
        for name in inputs:
            above = self.graph[name]
            elements = self._elements(read, above.output_shape, above.rows)
            casts = self.experiment.precision == "bf16" and layer.kind in ("conv2d", "linear")
            total += elements * min(self.itemsizes[name], HALF if casts else self.itemsizes[name])
        return total

    def _elements(self, layout: Layout, shape: tuple[int, ...], per_sample: int) -> float:
        """Of one pass, on average over ranks."""
        rows, _ = self.passes[0]
        return float(rows.elements(layout, shape, per_sample).mean())

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def _tailable(graph: Graph) -> frozenset[str]:
    """Layers behind which nothing mixes rows, so that they could run in rounds."""
    found: set[str] = set()
    for layer in reversed(graph.layers):
        if not mixes_rows(layer) and all(name in found for name in graph.consumers[layer.name]):
            found.add(layer.name)
    return frozenset(found)
