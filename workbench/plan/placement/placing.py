"""The layouts of every layer's inputs and output."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import ROWS, Layout, over, volume
from workbench.plan.placement.placement import Partial, Replicate, Shard, apportion
from workbench.plan.placement.rules import (
    SPLITTABLE,
    UNARY,
    after,
    before,
    can_keep,
    feature_dim,
    joins,
)


class Placing:
    """Finds the layouts of all layers, by the passes `preferred` and `place`.

    Args:
        graph: the model.
        choices: the choices of its layers.
        held: the layouts in which these layers must read, since their weights are placed so
            already.
    """

    def __init__(
        self,
        graph: Graph,
        choices: Mapping[str, LayerPlan],
        held: Mapping[str, Layout] = MappingProxyType({}),
    ) -> None:
        self.graph = graph
        self.choices = choices
        self.held = held
        self.inputs: dict[str, Layout] = {}
        self.outputs: dict[str, Layout] = {"input": ROWS}
        self.gathered = self._gathered_early()
        self.preferred = self._preferred()

    def place(self) -> None:
        for layer in self.graph.layers:
            coming = [self.outputs[name] for name in layer.inputs]
            held = self.held.get(layer.name)
            if layer.kind in SPLITTABLE:
                first = coming[0] if held is None else held
                read, given = placed_by_scheme(layer, self.choices.get(layer.name), first)
            else:
                gathered = self.gathered.get(layer.name)
                preferred = self.preferred[layer.name]
                read = held or read_without_scheme(self.graph, layer, coming, preferred, gathered)
                given = after(layer, read)
            self.inputs[layer.name], self.outputs[layer.name] = read, given

    def _scheme(self, layer: Layer) -> tuple[str, int]:
        return _scheme(layer, self.choices.get(layer.name))

    def _read_cut(self, layer: Layer, k: int) -> Shard:
        """The sharding that a layer prefers which reads its own features."""
        shares = self.choices[layer.name].shares or (1,) * k
        dim = feature_dim(layer.input_shape, layer.kind)
        each = layer.input_shape[0] // layer.groups if layer.groups > 1 else 1
        return Shard(dim, apportion(layer.input_shape[dim - 1] // each, shares)).scaled(each)

    def _preferred(self) -> dict[str, Layout]:
        """The layout that each layer prefers for its inputs."""
        preferred: dict[str, Layout] = {}
        for layer in reversed(self.graph.layers):
            scheme, k = self._scheme(layer)
            readers = self.graph.consumers[layer.name]
            wanted = preferred[readers[0]] if readers else ROWS
            if k == 1 and (wanted is ROWS or layer.kind in SPLITTABLE):
                preferred[layer.name] = ROWS
            elif layer.kind in SPLITTABLE:
                if scheme == "shard_in" or (scheme == "shard_out" and layer.groups > 1):
                    preferred[layer.name] = Layout(k, self._read_cut(layer, k))
                else:
                    preferred[layer.name] = over(k, Replicate())
            elif layer.kind in ("batch_norm", "add", "mul"):
                preferred[layer.name] = wanted if can_keep(layer, wanted) else ROWS
            elif joins(layer):
                preferred[layer.name] = wanted if wanted.placement == Replicate() else ROWS
            else:
                preferred[layer.name] = before(layer, wanted)
        return preferred

    def _gathered_early(self) -> dict[str, Layout]:
        """The layers without a scheme between a reader of whole groups and its cheapest gather."""
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


def placed_by_scheme(
    layer: Layer, choice: LayerPlan | None, coming: Layout
) -> tuple[Layout, Layout]:
    """The layouts of the input and output of a layer that can be split.

    Args:
        layer: a layer of a kind in `SPLITTABLE`.
        choice: the plan's choice for it; None: it is replicated.
        coming: the layout of its input before any conversion.
    """
    scheme, k = _scheme(layer, choice)
    if choice is None or scheme == "replicate":
        return ROWS, ROWS
    if scheme == "duplicate":
        return Layout(k, Replicate()), Layout(k, Replicate())
    if scheme == "shard_heads":
        return Layout(k, Replicate()), Layout(k, Partial())
    shares = choice.shares
    out_dim = feature_dim(layer.output_shape, layer.kind)
    in_dim = feature_dim(layer.input_shape, layer.kind)
    if scheme == "shard_out":
        if layer.groups == 1:
            sizes = apportion(layer.output_shape[out_dim - 1], shares or (1,) * k)
            return Layout(k, Replicate()), Layout(k, Shard(out_dim, sizes))
        groups = Shard(1, apportion(layer.groups, shares or (1,) * k))
        read = groups.scaled(layer.input_shape[0] // layer.groups)
        given = groups.scaled(layer.output_shape[0] // layer.groups)
        return Layout(k, read), Layout(k, given)
    if (
        shares is None
        and coming.group_size == k
        and isinstance(coming.placement, Shard)
        and coming.placement.dim == in_dim
    ):
        return coming, Layout(k, Partial())
    sizes = apportion(layer.input_shape[in_dim - 1], shares or (1,) * k)
    return Layout(k, Shard(in_dim, sizes)), Layout(k, Partial())


def read_without_scheme(
    graph: Graph, layer: Layer, coming: Sequence[Layout], preferred: Layout, gathered: Layout | None
) -> Layout:
    """The layout in which a layer without a scheme reads all its inputs.

    Args:
        graph: the graph that the layer is in.
        layer: a layer that cannot be split by itself.
        coming: the layouts of its inputs before any conversion.
        preferred: the layout that its readers prefer it to read in.
        gathered: the layout in which its input is gathered already for a later layer; None: it is
            not.
    """
    if not layer.inputs or layer.rows == 0 or layer.kind in ("parameter", "size"):
        return ROWS
    if layer.name in graph.shares_weights:
        return ROWS  # one placement for all that use the weights
    if gathered is not None:
        return gathered
    if preferred is ROWS and all([layout is ROWS for layout in coming]):
        return ROWS  # as most layers of most plans
    if layer.kind in (*UNARY, "batch_norm"):
        if can_keep(layer, coming[0]):
            return coming[0]
        return preferred if can_keep(layer, preferred) else ROWS
    if layer.kind in ("add", "mul"):
        shapes = [_shape(graph, name) for name in layer.inputs]
        every = (preferred, *coming, ROWS)
        candidates = [layout for layout in every if _shared(layer, shapes, layout)]
        return _least(graph, candidates, layer, coming, preferred)
    return _rows_or_whole(graph, layer, coming, preferred)


def _scheme(layer: Layer, choice: LayerPlan | None) -> tuple[str, int]:
    if layer.kind not in SPLITTABLE or choice is None or choice.group_size == 1:
        return "replicate", 1
    return choice.scheme, choice.group_size


def _rows_or_whole(
    graph: Graph, layer: Layer, coming: Sequence[Layout], preferred: Layout
) -> Layout:
    """The layout of a layer that reads whole samples: own rows, or all rows of the group.

    All rows if its inputs have that layout; and if it joins features of the group and that is no
    more traffic, as in a dense network, whose readers share what was gathered once.
    """
    first = coming[0]
    if first.placement == Replicate() and all(layout == first for layout in coming):
        return first
    met = any(layout.group_size == preferred.group_size for layout in coming)
    if not joins(layer) or preferred == ROWS or not met:
        return ROWS
    return _least(graph, (preferred, ROWS), layer, coming, preferred)


def _least(
    graph: Graph,
    candidates: Sequence[Layout],
    layer: Layer,
    coming: Sequence[Layout],
    preferred: Layout,
) -> Layout:
    """The one of these input layouts with the least traffic before and after the layer."""
    different = list(dict.fromkeys(candidates))
    if len(different) == 1:
        return different[0]

    def elements(target: Layout) -> float:
        there = sum(
            volume(layout, target, _shape(graph, name))
            for name, layout in zip(layer.inputs, coming, strict=True)
        )
        return there + volume(target, preferred, layer.output_shape)

    return min(different, key=elements)


def _shared(layer: Layer, shapes: Sequence[tuple[int, ...]], layout: Layout) -> bool:
    """Whether all inputs of an addition or product can have this layout at once."""
    if not isinstance(layout.placement, Shard):
        return can_keep(layer, layout)
    dim = layout.placement.dim
    return all(len(shape) >= dim and len(shape) == len(shapes[0]) for shape in shapes) and all(
        shape[dim - 1] == layout.placement.extent for shape in shapes
    )


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return graph.input_shape if name == "input" else graph[name].output_shape
