"""The layouts of every layer's inputs and output."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.choice import LayerPlan, placed_by_scheme
from workbench.plan.placement.layout import ROWS, Layout, volume
from workbench.plan.placement.placement import Replicate, Shard
from workbench.plan.placement.rules import (
    SPLITTABLE,
    UNARY,
    after,
    before,
    can_keep,
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
        # Of the layers that lie over a group by a scheme, the layout that they prefer to read.
        self.schemes = {
            name: placed_by_scheme(graph[name], choice, ROWS)[0]
            for name, choice in choices.items()
            if choice.group_size > 1
        }
        self.inputs: dict[str, Layout] = {}
        self.outputs: dict[str, Layout] = {"input": ROWS}
        self.gathered = self._gathered_early()
        self.preferred = self._preferred()

    def place(self) -> None:
        for layer in self.graph.layers:
            coming = [self.outputs[name] for name in layer.inputs]
            held = self.held.get(layer.name)
            if layer.kind in SPLITTABLE or layer.name in self.schemes:
                first = coming[0] if held is None else held
                read, given = placed_by_scheme(layer, self.choices.get(layer.name), first)
            else:
                gathered = self.gathered.get(layer.name)
                preferred = self.preferred[layer.name]
                read = held or read_without_scheme(self.graph, layer, coming, preferred, gathered)
                given = after(layer, read)
            self.inputs[layer.name], self.outputs[layer.name] = read, given

    def _preferred(self) -> dict[str, Layout]:
        """The layout that each layer prefers for its inputs."""
        preferred: dict[str, Layout] = {}
        for layer in reversed(self.graph.layers):
            readers = self.graph.consumers[layer.name]
            wanted = preferred[readers[0]] if readers else ROWS
            by_scheme = self.schemes.get(layer.name)
            if by_scheme is not None:
                preferred[layer.name] = by_scheme
            elif wanted is ROWS or layer.kind in SPLITTABLE:
                preferred[layer.name] = ROWS
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
            gathered = self.schemes.get(layer.name)
            if gathered is None or gathered.placement != Replicate() or layer.groups > 1:
                continue
            path: list[Layer] = []
            name = layer.inputs[0]
            best, cut = math.prod(layer.input_shape), 0
            while name != "input":
                above = self.graph[name]
                if above.kind not in UNARY or len(self.graph.consumers[name]) > 1:
                    break
                if name in self.schemes:
                    break
                path.append(above)
                if math.prod(above.input_shape) < best:
                    best, cut = math.prod(above.input_shape), len(path)
                name = above.inputs[0]
            early.update({above.name: gathered for above in path[:cut]})
        return early


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
