"""What each choice costs, so that the sum over a plan never exceeds what is predicted for it.

    layer       seconds of the layer's forward pass
    forward     seconds of conversions and the loss, one way
    gather      of these, seconds of gathers that could run beside a tail in rounds
    backward    seconds of all these, the other way
    gradients   seconds of the all-reduces that go on beside backward
    update      seconds of the optimizer
    resident    bytes of parameters and buffers, gradients that stay, and the optimizer's state
    beside      bytes that the layer keeps for its backward pass and that no other layer sees
    output      bytes of its output, where it keeps that itself
    first       bytes of the first value that it reads, as it reads it
    second      bytes of the second one
    converted   the same of the first one where it is read in another layout than it was given
    other       the same of the second one
    transient   bytes of gradients and workspace that are there at once in its backward pass
    space       of these, activations' gradients and workspace
    arrived     of these, activations' gradients
    made        bytes of gradients of its weights that are made beside those of earlier rounds
    settled     bytes of gradients of its weights that are there from its backward pass on
    entries     in how many layouts of groups values are read that lay in own rows
    over        the size of those groups, added up
    apart       1 where the layer reads a group's rows, 0 where it reads its own
    added up    seconds to add its weights' gradients to those of the round before

and then, for each size k of groups, seconds that rounds "B/K" over k take more, one way and the
other: each of them works on fewer rows, and begins anew.

What of these is there when is said in `keeping.py`.

Ranks wait for each other, so that a step takes as long as on the slowest; any weighted mean over
ranks is a lower bound of that. Where devices differ, they are weighted with their speed: then
the mean is that of a perfectly balanced plan.

Source: the functions by which a prediction times layers, conversions and updates.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from workbench.plan.choice import LayerPlan
from workbench.plan.experiment import Experiment
from workbench.plan.flow import Flow
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Layout
from workbench.plan.machine import Machine
from workbench.plan.plan import BatchNorm, Plan
from workbench.plan.routing import returned
from workbench.plan.tail import mixes_rows, round_rows
from workbench.plan.weights import place_weight
from workbench.predict.batches import micro_batches
from workbench.predict.duration import (
    Speeds,
    layer_seconds,
    loss_seconds,
)
from workbench.predict.pass_events import ADDED
from workbench.predict.program import program_of
from workbench.predict.search.conversion_costs import (
    ConversionCosts,
    Passes,
    Ways,
    more_of,
    passes_of,
)
from workbench.predict.search.footprint import Footprints
from workbench.predict.search.trellis import Cost, Floats, Readings
from workbench.predict.search.weight_costs import WeightCosts

LAYER, FORWARD, GATHER, BACKWARD, GRADIENTS, UPDATE, RESIDENT = range(7)
BESIDE, OUTPUT, FIRST, SECOND, CONVERTED, OTHER, TRANSIENT, SPACE, ARRIVED, MADE = range(7, 17)
SETTLED, ENTRIES, OVER, APART, ADDED_UP, ROUNDS = range(17, 23)
"""The first of the columns of rounds."""


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
        parts: group sizes of the tails that may run in rounds.
    """

    def __init__(
        self,
        experiment: Experiment,
        machine: Machine,
        weights: Floats,
        parts: Sequence[int] = (),
    ) -> None:
        plan = cast(Plan, experiment.plan)
        self.experiment, self.graph, self.world = experiment, plan.graph, plan.world_size
        self.speeds = Speeds(machine, range(self.world))
        self.weights = weights
        self.measured = any(device.samples for device in machine.devices)
        batches = micro_batches(experiment)
        self.parts = tuple(parts)
        self.passes = passes_of(batches)
        self.rounds = [
            passes_of([part for rows in batches for part in round_rows("B/K", rows, k)])
            for k in self.parts
        ]
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
        self._batch_norm = plan.batch_norm
        self._conversions = ConversionCosts(self.speeds, weights, self.passes, self.rounds)
        self._nothing = (0.0,) * (ROUNDS + 2 * len(self.parts))
        self.footprints = Footprints(experiment, self.passes[0][0], self.itemsizes, self.learns)

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
        )
        kept = self.footprints.counted(layer)
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
        tails = self.rounds if layer.name in self.tailable else []
        (forward, backward), *others = [
            self._computing(alone, layer, passes) for passes in (self.passes, *tails)
        ]
        of_weights = self.of_weights.of(layer, placed)
        room = self.footprints.of(layer, choice, read, given, placed)
        count = sum(times for _, times in self.passes)
        backward += (count - 1) * of_weights.added
        times = (forward, 0.0, 0.0, backward, of_weights.summed, of_weights.update)
        apart = float(read != ROWS)
        more = more_of(Ways(forward, backward), others, len(self.parts))
        held, settled = of_weights.held, of_weights.settled
        return *times, held, *room, settled, 0.0, 0.0, apart, count * of_weights.added, *more

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost:
        """Of what a layer reads in another layout than it was given."""
        cost = list(self._nothing)
        slots = self.footprints.slots(layer)
        if layer.name in self.learns and name in slots:
            cost[CONVERTED + slots.index(name)] = self.footprints.read(layer, name, read)
        return tuple(cost)

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """Of a layer's output: its conversions, and the loss where the model returns it."""
        if name == "input":
            shape, per_sample = self.graph.input_shape, 1
        else:
            shape, per_sample = self.graph[name].output_shape, self.graph[name].rows
        if per_sample == 0:
            return self._nothing
        count = 1 + len(self.parts)
        ways, gather = [Ways(0.0, 0.0)] * count, 0.0
        ends = name in self.graph.outputs
        read = frozenset[tuple[Layout, bool]]() if carried else readings
        for step in self._conversions.steps(source, read, shape, per_sample, ends=ends):
            tails = name in self.tailable or name in self.before_tails
            crossed = self._conversions.of(step, self.itemsizes[name], name in self.learns, tails)
            if step.source == ROWS and name in self.before_tails:
                gather += crossed[0].forward
                crossed = crossed[:1]  # beside a tail, rounds need not take more
            crossed = crossed if len(crossed) == count else crossed[:1] * count
            ways = [way.plus(more) for way, more in zip(ways, crossed, strict=True)]
        if name in self.graph.outputs:
            size = self.itemsizes[name]
            layout = returned(source, shape)
            losses = [
                self._loss(passes, layout, shape, per_sample, size)
                for passes in (self.passes, *self.rounds)
            ]
            ways = [way.plus(loss) for way, loss in zip(ways, losses, strict=True)]
        (forward, backward), *others = ways
        groups = {read.group_size for read, _ in readings if read != ROWS}
        over = groups - {source.group_size}
        entries = float(len(over)), float(sum(over))
        more = more_of(Ways(forward, backward), others, len(self.parts))
        backward += self._added(name, source, readings, shape, per_sample)
        nothing = (0.0,) * (ENTRIES - GRADIENTS)
        return 0.0, forward, gather, backward, *nothing, *entries, 0.0, 0.0, *more

    def _computing(self, alone: Plan, layer: Layer, passes: Passes) -> Ways:
        """Seconds of a layer."""
        forward = backward = 0.0
        if layer.kind in ("size", "parameter"):
            return Ways(forward, backward)
        for rows, times in passes:
            found = layer_seconds(alone, layer, rows, self.experiment.precision, self.speeds)
            forward += times * self._mean(found.forward)
            half = found.estimated and not self._passes_on(layer)  # the weights' gradient
            backward += times * self._mean(found.backward) * (0.5 if half else 1.0)
        return Ways(forward, backward * (layer.name in self.learns))

    def _loss(
        self, passes: Passes, layout: Layout, shape: tuple[int, ...], per_sample: int, size: int
    ) -> Ways:
        total = 0.0
        for rows, times in passes:
            logits = rows.elements(layout, shape, per_sample) * size
            total += times * self._mean(loss_seconds(logits, self.speeds))
        return Ways(total, total)

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

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def _tailable(graph: Graph) -> frozenset[str]:
    """Layers behind which nothing mixes rows, so that they could run in rounds."""
    found: set[str] = set()
    for layer in reversed(graph.layers):
        if not mixes_rows(layer) and all(name in found for name in graph.consumers[layer.name]):
            found.add(layer.name)
    return frozenset(found)
