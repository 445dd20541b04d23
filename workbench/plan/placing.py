"""The layouts in which every layer reads its inputs and gives its output."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Layout, over, volume
from workbench.plan.placement import Partial, Replicate, Shard, apportion
from workbench.plan.rules import SPLITTABLE, UNARY, after, before, can_keep, feature_dim, joins


class Placing:
    """The passes `wish` and `place`.

    Args:
        graph: the model.
        choices: of its layers.
        held: the layouts in which these layers read, whatever comes: their weights lie so already.
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
        if scheme == "shard_heads":
            return Layout(k, Replicate()), Layout(k, Partial())
        shares = self.choices[layer.name].shares
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
        coming = self.held.get(layer.name, self.outputs[layer.inputs[0]])
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
        if layer.name in self.held:
            return self.held[layer.name]
        if not layer.inputs or layer.rows == 0 or layer.kind in ("parameter", "size"):
            return ROWS
        if layer.name in self.graph.shares_weights:
            return ROWS  # one placement for all that use the weights
        coming = [self.outputs[name] for name in layer.inputs]
        if layer.name in self.gathered:
            return self.gathered[layer.name]
        if self.wishes[layer.name] is ROWS and all([layout is ROWS for layout in coming]):
            return ROWS  # as most layers of most plans
        if layer.kind in (*UNARY, "batch_norm"):
            if can_keep(layer, coming[0]):
                return coming[0]
            wish = self.wishes[layer.name]
            return wish if can_keep(layer, wish) else ROWS
        if layer.kind in ("add", "mul"):
            return self._cheapest(layer, coming)
        return self._rows_or_whole(layer, coming)

    def _rows_or_whole(self, layer: Layer, coming: list[Layout]) -> Layout:
        """For a layer that reads whole samples: own rows, or all of the group's.

        All where its inputs lie so; and where it joins features of the group and that is no more
        traffic, as in a dense network, whose readers share what was gathered once.
        """
        first, wish = coming[0], self.wishes[layer.name]
        if first.placement == Replicate() and all(layout == first for layout in coming):
            return first
        met = any(layout.group_size == wish.group_size for layout in coming)
        if not joins(layer) or wish == ROWS or not met:
            return ROWS
        return self._least((wish, ROWS), layer, coming, wish)

    def _cheapest(self, layer: Layer, coming: list[Layout]) -> Layout:
        """Of the layouts that its inputs have, or that its readers wish: the least traffic."""
        wish = self.wishes[layer.name]
        candidates = [layout for layout in (wish, *coming, ROWS) if self._shared(layer, layout)]
        return self._least(candidates, layer, coming, wish)

    def _least(
        self, candidates: Sequence[Layout], layer: Layer, coming: list[Layout], wish: Layout
    ) -> Layout:
        """Of these layouts of a layer's inputs, the one with the least traffic before and after."""

        def elements(target: Layout) -> float:
            there = sum(
                volume(layout, target, self._shape(name))
                for name, layout in zip(layer.inputs, coming, strict=True)
            )
            return there + volume(target, wish, layer.output_shape)

        return min(candidates, key=elements)

    def _read_cut(self, layer: Layer, k: int) -> Shard:
        """How a layer that reads its own features would like them."""
        shares = self.choices[layer.name].shares or (1,) * k
        dim = feature_dim(layer.input_shape, layer.kind)
        each = layer.input_shape[0] // layer.groups if layer.groups > 1 else 1
        return Shard(dim, apportion(layer.input_shape[dim - 1] // each, shares)).scaled(each)

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
            if k == 1 and (wanted is ROWS or layer.kind in SPLITTABLE):
                wishes[layer.name] = ROWS
            elif layer.kind in SPLITTABLE:
                if scheme == "shard_in" or (scheme == "shard_out" and layer.groups > 1):
                    wishes[layer.name] = Layout(k, self._read_cut(layer, k))
                else:
                    wishes[layer.name] = over(k, Replicate())
            elif layer.kind in ("batch_norm", "add", "mul"):
                wishes[layer.name] = wanted if can_keep(layer, wanted) else ROWS
            elif joins(layer):
                wishes[layer.name] = wanted if wanted.placement == Replicate() else ROWS
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
