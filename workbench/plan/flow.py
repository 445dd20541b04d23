"""From a plan's choices to the placement of every activation and weight, and the conversions.

Three passes over the graph:

    wish      from the outputs up: the layout in which each layer would like its input. Only
              a pending sum (P) has to choose a target without a reason of its own; it takes
              its reader's wish.
    place     from the input down: each layer's input and output layout. Layers with a
              scheme are given theirs; the others keep what they get.
    route     each edge whose two ends differ gets its conversions, and each edge over which a
              gradient comes back as summands gets the sum, as far up as it may wait.

A gather stands where its tensor is smallest: VGG at 32x32 pools 512 features to 25,088 just
before its classifier, so that the rows are gathered before that pool.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer, Weight
from workbench.plan.layout import ROWS, Conversion, Gradient, Layout, over, route, volume
from workbench.plan.placement import Partial, Placement, Replicate, Shard, apportion
from workbench.plan.rules import (
    CARRIES_PARTIAL,
    SPLITTABLE,
    UNARY,
    after,
    before,
    can_keep,
    feature_dim,
)


@dataclass(frozen=True)
class WeightPlacement:
    """Where one parameter or buffer lies: rank r holds piece r % group_size of `placement`."""

    placement: Replicate | Shard
    group_size: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece that this rank of the world holds."""
        if isinstance(self.placement, Replicate):
            return self.shape
        shape = list(self.shape)
        shape[self.placement.dim] = self.placement.sizes[rank % self.group_size]
        return tuple(shape)

    def piece_numel(self, rank: int) -> int:
        """Elements that this rank of the world holds."""
        return math.prod(self.piece_shape(rank))


@dataclass(frozen=True)
class Flow:
    """The placements that a plan leads to.

    Attributes:
        inputs: for each layer, the layout in which it reads its inputs.
        outputs: for each layer, the layout of what it gives ("input": the model's own input).
        edges: for each (producer, reader), the conversions between them, in order. Two
            readers whose conversions start alike share them.
        returns: for each output of the model, the conversions after it.
        weights: for each name of the state_dict, where it lies.
    """

    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    edges: Mapping[tuple[str, str], tuple[Conversion, ...]]
    returns: Mapping[str, tuple[Conversion, ...]]
    weights: Mapping[str, WeightPlacement]

    def returned(self, name: str) -> Layout:
        """The layout in which the model returns this output."""
        steps = self.returns[name]
        return steps[-1].target if steps else self.outputs[name]


def flow_of(graph: Graph, choices: Mapping[str, LayerPlan]) -> Flow:
    """Places every activation and weight of `graph` under `choices`; others replicate."""
    placing = _Placing(graph, choices)
    placing.place()
    edges, returns = _route(graph, choices, placing.inputs, placing.outputs)
    weights = {
        weight.name: _place_weight(layer, weight, placing.inputs[layer.name], choices)
        for layer in graph.layers
        for weight in layer.weights
    }
    return Flow(placing.inputs, placing.outputs, edges, returns, weights)


class _Placing:
    """The passes `wish` and `place`."""

    def __init__(self, graph: Graph, choices: Mapping[str, LayerPlan]) -> None:
        self.graph = graph
        self.choices = choices
        self.inputs: dict[str, Layout] = {}
        self.outputs: dict[str, Layout] = {"input": ROWS}
        self.gathered = self._gathered_early()
        self.wishes = self._wishes()

    def place(self) -> None:
        for layer in self.graph.layers:
            if layer.kind in SPLITTABLE:
                read, given = self._by_scheme(layer)
            else:
                read = self._followed(layer)
                given = after(layer, read)
            self.inputs[layer.name], self.outputs[layer.name] = read, given

    def _scheme(self, layer: Layer) -> tuple[str, int]:
        choice = self.choices.get(layer.name)
        if layer.kind not in SPLITTABLE or choice is None or choice.group_size == 1:
            return "replicate", 1
        return choice.scheme, choice.group_size

    def _by_scheme(self, layer: Layer) -> tuple[Layout, Layout]:
        scheme, k = self._scheme(layer)
        if scheme == "replicate":
            return ROWS, ROWS
        if scheme == "duplicate":
            return Layout(k, Replicate()), Layout(k, Replicate())
        shares = self.choices[layer.name].shares
        out_dim = feature_dim(layer.output_shape, layer.kind)
        in_dim = feature_dim(layer.input_shape, layer.kind)
        if scheme == "shard_out":
            groups = apportion(layer.groups, shares or (1,) * k)
            if layer.groups > 1:
                read: Placement = Shard(1, _scale(groups, layer.input_shape[0] // layer.groups))
                sizes = _scale(groups, layer.output_shape[0] // layer.groups)
            else:
                read = Replicate()
                sizes = apportion(layer.output_shape[out_dim - 1], shares or (1,) * k)
            return Layout(k, read), Layout(k, Shard(out_dim, sizes))
        coming = self.outputs[layer.inputs[0]]
        if (
            shares is None
            and coming.group_size == k
            and isinstance(coming.placement, Shard)
            and coming.placement.dim == in_dim
        ):
            return coming, Layout(k, Partial())
        sizes = apportion(layer.input_shape[in_dim - 1], shares or (1,) * k)
        return Layout(k, Shard(in_dim, sizes)), Layout(k, Partial())

    def _followed(self, layer: Layer) -> Layout:
        """The layout in which a layer without a scheme reads all its inputs."""
        if not layer.inputs or layer.rows == 0 or layer.kind in ("parameter", "size"):
            return ROWS
        if layer.name in self.graph.shares_weights:
            return ROWS  # one placement for all that use the weights
        coming = [self.outputs[name] for name in layer.inputs]
        if layer.name in self.gathered:
            return self.gathered[layer.name]
        if layer.kind in (*UNARY, "batch_norm"):
            if can_keep(layer, coming[0]):
                return coming[0]
            wish = self.wishes[layer.name]
            return wish if can_keep(layer, wish) else ROWS
        if layer.kind in ("add", "mul"):
            return self._cheapest(layer, coming)
        first = coming[0]
        alike = all(layout == first for layout in coming)
        return first if alike and first.placement == Replicate() else ROWS

    def _cheapest(self, layer: Layer, coming: list[Layout]) -> Layout:
        """Of the layouts that its inputs have, or that its readers wish: the least traffic."""
        wish = self.wishes[layer.name]
        candidates = [layout for layout in (wish, *coming, ROWS) if self._shared(layer, layout)]

        def elements(target: Layout) -> float:
            there = sum(
                volume(layout, target, self._shape(name))
                for name, layout in zip(layer.inputs, coming, strict=True)
            )
            return there + volume(target, wish, layer.output_shape)

        return min(candidates, key=elements)

    def _shared(self, layer: Layer, layout: Layout) -> bool:
        """Whether all inputs of an addition or product can lie like this at once."""
        if not isinstance(layout.placement, Shard):
            return can_keep(layer, layout)
        dim = layout.placement.dim
        shapes = [self._shape(name) for name in layer.inputs]
        return all(len(shape) >= dim and len(shape) == len(shapes[0]) for shape in shapes) and all(
            shape[dim - 1] == layout.placement.extent for shape in shapes
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.input_shape if name == "input" else self.graph[name].output_shape

    def _wishes(self) -> dict[str, Layout]:
        """For each layer, the layout that it would like its inputs to have."""
        wishes: dict[str, Layout] = {}
        for layer in reversed(self.graph.layers):
            scheme, k = self._scheme(layer)
            readers = self.graph.consumers[layer.name]
            wanted = wishes[readers[0]] if readers else ROWS
            if layer.kind in SPLITTABLE:
                if scheme == "shard_in" or (scheme == "shard_out" and layer.groups > 1):
                    dim = feature_dim(layer.input_shape, layer.kind)
                    sizes = apportion(layer.input_shape[dim - 1], (1,) * k)
                    wishes[layer.name] = Layout(k, Shard(dim, sizes))
                else:
                    wishes[layer.name] = over(k, Replicate())
            elif layer.kind in ("batch_norm", "add", "mul"):
                wishes[layer.name] = wanted if can_keep(layer, wanted) else ROWS
            else:
                wishes[layer.name] = before(layer, wanted)
        return wishes

    def _gathered_early(self) -> dict[str, Layout]:
        """The followers between a layer that reads whole groups and its cheapest gather."""
        early: dict[str, Layout] = {}
        for layer in self.graph.layers:
            scheme, k = self._scheme(layer)
            if k == 1 or scheme == "shard_in" or layer.groups > 1:
                continue
            path: list[Layer] = []
            name = layer.inputs[0]
            best, cut = math.prod(layer.input_shape), 0
            while name != "input":
                above = self.graph[name]
                if above.kind not in UNARY or len(self.graph.consumers[name]) > 1:
                    break
                path.append(above)
                if math.prod(above.input_shape) < best:
                    best, cut = math.prod(above.input_shape), len(path)
                name = above.inputs[0]
            early.update({above.name: Layout(k, Replicate()) for above in path[:cut]})
        return early


def _route(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> tuple[dict[tuple[str, str], tuple[Conversion, ...]], dict[str, tuple[Conversion, ...]]]:
    """Conversions on every edge; readers are met before what they read, gradients flow up."""
    edges: dict[tuple[str, str], tuple[Conversion, ...]] = {}
    carried: dict[str, Gradient] = {}  # how the gradient of each layer's output arrives

    def arrives(reader: Layer) -> Gradient:
        """How the gradient of what `reader` reads leaves it."""
        layout = inputs[reader.name]
        if layout == ROWS or layout.placement != Replicate():
            return "same"
        if reader.kind in SPLITTABLE:
            return "partial" if choices[reader.name].scheme == "shard_out" else "same"
        return carried[reader.name] if reader.kind in CARRIES_PARTIAL else "same"

    for name in [*(layer.name for layer in reversed(graph.layers)), "input"]:
        shape = graph.input_shape if name == "input" else graph[name].output_shape
        rows = 1 if name == "input" else graph[name].rows
        may_carry = name != "input" and graph[name].kind in CARRIES_PARTIAL
        readers = [graph[reader] for reader in graph.consumers[name]]
        source = outputs[name]
        by_target: dict[Layout, list[Layer]] = {}
        for reader in readers:
            by_target.setdefault(inputs[reader.name], []).append(reader)
        carried[name] = "same"
        for target, group in by_target.items():
            if rows == 0:  # the same on every rank: nothing to convert
                edges.update({(name, reader.name): () for reader in group})
                continue
            summands = [reader for reader in group if arrives(reader) == "partial"]
            all_summands = len(summands) == len(group)
            if target == source and all_summands and len(by_target) == 1 and may_carry:
                if name not in graph.outputs:
                    carried[name] = "partial"
                    edges.update({(name, reader.name): () for reader in group})
                    continue
            merged: Gradient = "partial" if all_summands and target != source else "same"
            steps = _steps(source, target, merged, shape, rows)
            copy = Conversion(target, target, "partial", shape, rows)
            for reader in group:
                sums_here = reader in summands and merged == "same"
                edges[name, reader.name] = (*steps, copy) if sums_here else steps

    returns: dict[str, tuple[Conversion, ...]] = {}
    for name in graph.outputs:
        shape, source = graph[name].output_shape, outputs[name]
        cut_classes = isinstance(source.placement, Shard) and len(shape) == 1
        whole_rows = source.placement == Replicate() and len(shape) == 1
        target = source if cut_classes or whole_rows else ROWS
        returns[name] = _steps(source, target, "same", shape, graph[name].rows)
    return edges, returns


def _steps(
    source: Layout, target: Layout, gradient: Gradient, shape: tuple[int, ...], rows: int
) -> tuple[Conversion, ...]:
    path = route(source, target)
    starts = (source, *path)
    return tuple(
        Conversion(start, end, gradient if end is path[-1] else "same", shape, rows)
        for start, end in zip(starts, path, strict=False)
    )


def _place_weight(
    layer: Layer, weight: Weight, read: Layout, choices: Mapping[str, LayerPlan]
) -> WeightPlacement:
    """A weight's placement from its layer's scheme, or from the layout that the layer follows."""

    def placed(placement: Replicate | Shard, group_size: int) -> WeightPlacement:
        return WeightPlacement(placement, group_size, weight.shape, weight.dtype, weight.trainable)

    k = read.group_size
    whole = len(weight.shape) == 0 or k == 1
    if layer.kind in SPLITTABLE and not whole:
        choice = choices[layer.name]
        if choice.scheme == "shard_out":
            groups = apportion(layer.groups, choice.shares or (1,) * k)
            sizes = (
                _scale(groups, weight.shape[0] // layer.groups)
                if layer.groups > 1
                else apportion(weight.shape[0], choice.shares or (1,) * k)
            )
            return placed(Shard(0, sizes), k)
        if choice.scheme == "shard_in":
            assert isinstance(read.placement, Shard)
            if len(weight.shape) > 1:
                return placed(Shard(1, read.placement.sizes), k)
            # The bias is added once: by the first rank that has a summand to add it to.
            owner = next(r for r, size in enumerate(read.placement.sizes) if size)
            return placed(Shard(0, tuple(weight.shape[0] * (r == owner) for r in range(k))), k)
    if isinstance(read.placement, Shard) and not whole:
        return placed(Shard(0, read.placement.sizes), k)
    return placed(Replicate(), k)


def _scale(sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return tuple(size * factor for size in sizes)
