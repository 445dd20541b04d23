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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from workbench.plan.experiment.experiment import Experiment, Synchronous
from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.flow import (
    Flow,
    WeightPlacement,
    crossings,
    place_weight,
    returned,
    summed_over,
)
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import (
    ROWS,
    Conversion,
    Layout,
    Replicate,
    group_sizes,
    replica_groups,
)
from workbench.plan.placement.rules import cut_through, read_whole
from workbench.plan.plans.plan import BatchNorm, Plan
from workbench.predict.search.footprint import Footprints
from workbench.predict.search.trellis import Cost, Floats, Readings
from workbench.predict.time.duration import (
    Seconds,
    Speeds,
    conversion_seconds,
    half_goes_back,
    layer_seconds,
    loss_seconds,
    update_seconds,
)
from workbench.predict.time.step_events import ADDED, addition
from workbench.program.buckets import KEEPS_GRADIENT_BYTES, copies, itemsize, piece
from workbench.program.rows import Counts, HostLayout, Rows, micro_batches
from workbench.program.step import program_of


class PassSeconds(NamedTuple):
    """Seconds of the forward and of the backward pass."""

    forward: float
    backward: float


# The distinct rows of passes, and the number of passes with each.
Passes = list[tuple[Rows, int]]


class ConversionCosts:
    """The time of any conversion, in all passes of a step.

    Args:
        weights: the weight of each rank in the mean of times [ranks].
    """

    def __init__(self, speeds: Speeds, weights: Floats, passes: Passes) -> None:
        self.speeds, self.weights, self.passes = speeds, weights, passes
        self._chains: dict[Hashable, list[tuple[Conversion, ...]]] = {}
        self._crossed: dict[tuple[Conversion, int, bool], PassSeconds] = {}

    def of(self, step: Conversion, width: int, learns: bool) -> PassSeconds:
        """Seconds of a conversion in a step's passes, the mean over ranks.

        Args:
            width: the bytes of an element.
            learns: whether a gradient comes back.
        """
        key = (step, width, learns)
        known = self._crossed.get(key)
        if known is None:
            known = self._crossed[key] = self._taken(step, width, learns)
        return known

    def steps(
        self,
        source: Layout,
        readings: Readings,
        shape: tuple[int, ...],
        per_sample: int,
        ends: Layout | None,
    ) -> list[Conversion]:
        """The conversions of a value; readers whose conversions start alike share them.

        Args:
            per_sample: the rows of dimension 0 for each sample.
            ends: the layout in which the model returns the value; None: it does not.
        """
        chains: list[tuple[Conversion, ...]] = []
        for target in {layout for layout, _ in readings}:
            summands = tuple(sorted(sums for layout, sums in readings if layout == target))
            chains += self._chain(source, target, summands, shape, per_sample)
        if ends is not None:
            chains += self._chain(source, ends, (False,), shape, per_sample)
        if len(chains) == 1:
            return list(chains[0])
        prefixes = {chain[: end + 1] for chain in chains for end in range(len(chain))}
        return [prefix[-1] for prefix in prefixes]

    def _chain(
        self,
        source: Layout,
        target: Layout,
        summands: tuple[bool, ...],
        shape: tuple[int, ...],
        per_sample: int,
    ) -> list[tuple[Conversion, ...]]:
        key = (source, target, summands, shape, per_sample)
        if key not in self._chains:
            self._chains[key] = crossings(source, target, summands, shape, per_sample)
        return self._chains[key]

    def _taken(self, step: Conversion, width: int, learns: bool) -> PassSeconds:
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
        return PassSeconds(forward, backward)

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def passes_of(batches: Sequence[tuple[int, ...]]) -> Passes:
    return [(Rows(rows), batches.count(rows)) for rows in dict.fromkeys(batches)]


class WeightCost(NamedTuple):
    """The cost of a layer's weights.

    Attributes:
        summed: the seconds of the reduction of their gradients.
        update: the seconds of the optimizer's update.
        held: the bytes that stay from step to step.
        settled: the bytes of gradients that are alive from the layer's backward pass on.
        added: the seconds to add a further pass's gradients to those of the first.
    """

    summed: float
    update: float
    held: float
    settled: float
    added: float


NO_WEIGHTS = WeightCost(0.0, 0.0, 0.0, 0.0, 0.0)


class WeightCosts:
    """The cost of any layer's weights, the mean over ranks.

    Args:
        experiment: the experiment, for its optimizer, buckets and precision.
        weights: the weight of each rank in the mean of times [ranks].
    """

    def __init__(self, experiment: Experiment, speeds: Speeds, weights: Seconds) -> None:
        self.experiment, self.speeds, self.weights = experiment, speeds, weights
        self.world = speeds.ranks.size
        self._of_weights = experiment.sync.timing.of_weights
        self._kept = copies(experiment.optimizer) + (experiment.ema is not None)
        self._shares = {k: self._share(k) for k in group_sizes(self.world)}
        self._rates = {k: self._rate(k) for k in group_sizes(self.world)}

    def of(self, layer: Layer, placed: Mapping[str, WeightPlacement]) -> WeightCost:
        """The cost of the layer's own weights."""
        summed = update = memory = settled = added = 0.0
        if layer.shared:
            return NO_WEIGHTS
        experiment = self.experiment
        synchronous = isinstance(experiment.sync, Synchronous)
        of_weights = self._of_weights
        optimizer = experiment.optimizer
        for index, weight in enumerate(layer.weights):
            where = placed[weight.name]
            size = piece(where, self.world) * itemsize(where, experiment.precision)
            memory += float(size.mean())
            if not weight.trainable:
                continue
            if not synchronous and not of_weights:
                continue  # a server may have all of it
            members = self.world // where.group_size
            if not (isinstance(experiment.sync, Synchronous) and experiment.sync.per_round):
                buckets = members > 1 and not of_weights
                added += self._mean(addition(layer, index, size, buckets, self.speeds))
            owners = members if experiment.shard_optimizer else 1
            memory += float(size.mean()) * self._kept / owners
            held = update_seconds(optimizer, size.astype(np.float64), self.speeds)
            update += self._mean(held) / owners
            if members == 1 or not synchronous:
                rewrites = layer.kind == "linear" and index == 0
                rewrites &= synchronous and not experiment.half
                stays = float((size * ((size >= KEEPS_GRADIENT_BYTES) & rewrites)).mean())
                memory += stays
                settled += float(size.mean()) - stays
                continue
            memory += float((size * (1 + self._shares[where.group_size])).mean())
            summed += self._summed(size, where.group_size)
        return WeightCost(summed, update, memory, settled, added)

    def _summed(self, size: Counts, group_size: int) -> float:
        """The least time that one gradient adds to the all-reduces of its buckets, in seconds.

        A bucket is closed by the gradient that fills it; so it holds less than twice its size
        unless that gradient alone fills it, and then the others in it hold less than that size.
        """
        bucket = self.experiment.sync.bucket_bytes
        latency, rate = self._rates[group_size]
        seconds = latency * np.minimum(size / (2 * bucket), 0.5) + rate * size
        return self._mean(seconds)

    def _rate(self, group_size: int) -> tuple[float, float]:
        """Lower bounds: (seconds of an all-reduce over replicas, seconds for each byte in it).

        With a fused update gradients are only in the reduce-scatter.
        """
        sync = self.experiment.sync
        if not isinstance(sync, Synchronous) or sync.codec or group_size == self.world:
            return 0.0, 0.0
        if isinstance(sync.algorithm, Own):  # its time need not grow evenly with its bytes
            return 0.0, 0.0
        members = range(0, self.world, group_size)
        topology, algorithm = self.speeds.topology(members), sync.algorithm
        beside = not (topology.memory and max(topology.hosts) > 1)
        sizes = [float(2**power) for power in range(10, 33, 2)]
        seconds = [topology.all_reduce(size, algorithm, beside=beside).seconds for size in sizes]
        rate = min(after / size for after, size in zip(seconds, sizes, strict=True))
        latency = min(t - rate * size for t, size in zip(seconds, sizes, strict=True))
        part = 0.5 if self.experiment.fused else 1.0
        return part * max(latency, 0.0), part * rate

    def _share(self, group_size: int) -> Seconds:
        """The fraction of a bucket's sum on each rank, where ranks of a host share it [ranks]."""
        machine = self.speeds.machine
        hosts = HostLayout.of(self.world, machine.ranks_per_host)
        mates = hosts.mates(replica_groups(group_size, self.world))
        return np.where((mates > 1) & (not machine.own_gpus), 1 / mates, 0.0)

    def _mean(self, seconds: Seconds) -> float:
        return float(self.weights @ seconds)


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
