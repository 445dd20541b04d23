"""The placement of every activation and weight, and the conversions, from a plan's choices.

Three passes over the graph:

    prefer    from the outputs up: the layout that each layer prefers for its input. Only
              a pending sum (P) has to choose a target without a reason of its own; it takes
              what its reader prefers.
    place     from the input down: each layer's input and output layout. Layers with a
              scheme have theirs; the others keep their input's.
    route     each edge whose two ends differ gets its conversions, and each edge over which a
              gradient comes back as summands gets the sum, as far up as it may wait.

What a layer prefers is its own rows, where no later layer says otherwise. If tokens are divided, a
layer that computes each token by itself prefers some tokens of all the group's rows, wherever cut
layers read what it gives: so a pending sum is scattered by tokens, and gathered by tokens later.

A gather is placed where its tensor is smallest: VGG at 32x32 pools 512 features to 25,088 just
before its classifier, so the rows are gathered before that pool.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from workbench.plan.graph.graph import Graph, Layer, Weight
from workbench.plan.placement.layer_plan import LayerPlan, placed_by_scheme
from workbench.plan.placement.placement import (
    ROWS,
    Conversion,
    Gradient,
    Layout,
    Replicate,
    Shard,
    route,
)
from workbench.plan.placement.rules import (
    CARRIES_PARTIAL,
    SPLITTABLE,
    UNARY,
    Tokens,
    Ways,
    after,
    before,
    by_tokens,
    can_keep,
    cut_through,
    is_by_tokens,
    joins,
    read_whole,
    read_without_scheme,
    way_of,
)


@dataclass(frozen=True)
class WeightPlacement:
    """The placement of a parameter or buffer: rank r holds piece r % group_size of it."""

    placement: Replicate | Shard
    group_size: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the piece that this rank of the world holds."""
        if isinstance(self.placement, Replicate):
            return self.shape
        shape = list(self.shape)
        shape[self.placement.dim] = self.placement.length(rank % self.group_size)
        return tuple(shape)

    def piece_numel(self, rank: int) -> int:
        """The number of elements that this rank of the world holds."""
        return math.prod(self.piece_shape(rank))


def place_weight(
    layer: Layer, weight: Weight, read: Layout, choices: Mapping[str, LayerPlan]
) -> WeightPlacement:
    """A weight's placement from its layer's scheme, or from the layout that the layer follows."""

    def placed(placement: Replicate | Shard, group_size: int) -> WeightPlacement:
        return WeightPlacement(placement, group_size, weight.shape, weight.dtype, weight.trainable)

    k, choice = read.group_size, choices.get(layer.name)
    if way_of(layer, read) is not None:
        return placed(Replicate(), 1)  # each rank's gradient is a summand, as with rows of its own
    if len(weight.shape) == 0 or k == 1:
        return placed(Replicate(), k)
    if choice is not None and choice.group_size > 1:
        division = choice.division(layer)
        return placed(choice.meant.holds(layer, weight, division, read.placement), k)
    if isinstance(read.placement, Shard):
        return placed(Shard(0, read.placement.sizes, read.placement.blocks), k)
    return placed(Replicate(), k)


def heads_of(layer: Layer, choice: LayerPlan | None) -> tuple[int, ...] | None:
    """How many heads each rank of a group has of an attention layer; None: all of them."""
    if choice is None or choice.group_size == 1 or layer.kind != "attention":
        return None
    return choice.meant.heads(layer, choice.division(layer))


class Placing:
    """Finds the layouts of all layers, by the passes `preferred` and `place`.

    Args:
        held: the layouts in which these layers must read, since their weights are placed so
            already.
    """

    def __init__(
        self,
        graph: Graph,
        choices: Mapping[str, LayerPlan],
        held: Mapping[str, Layout] = MappingProxyType({}),
        tokens: Tokens = False,
    ) -> None:
        self.graph = graph
        self.choices = choices
        self.held = held
        self.tokens = tokens
        # Of the layers that lie over a group by a scheme, the layout that they prefer to read.
        self.schemes = {
            name: placed_by_scheme(graph[name], choice, ROWS)[0]
            for name, choice in choices.items()
            if choice.group_size > 1
        }
        self.inputs: dict[str, Layout] = {}
        self.outputs: dict[str, Layout] = dict.fromkeys(graph.sources, ROWS)
        self.gathered = self._gathered_early()
        self.preferred = self._preferred()

    def place(self) -> None:
        for layer in self.graph.layers:
            coming = [self.outputs[name] for name in layer.inputs]
            held = self.held.get(layer.name)
            if layer.kind in SPLITTABLE or layer.name in self.schemes:
                shares = layer.name in self.graph.shares_weights
                first = held or (ROWS if shares else coming[0])
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
            divided = None
            if self.tokens and layer.kind not in SPLITTABLE:
                divided = self._by_tokens(layer, [preferred[name] for name in readers])
            if by_scheme is not None:
                preferred[layer.name] = by_scheme
            elif divided is not None:
                preferred[layer.name] = divided
            elif wanted is ROWS or layer.kind in SPLITTABLE:
                preferred[layer.name] = ROWS
            elif layer.kind in ("batch_norm", "add", "mul"):
                preferred[layer.name] = wanted if can_keep(layer, wanted) else ROWS
            elif joins(layer):
                preferred[layer.name] = wanted if wanted.placement == Replicate() else ROWS
            else:
                preferred[layer.name] = before(layer, wanted)
        return preferred

    def _by_tokens(self, layer: Layer, preferred: Sequence[Layout]) -> Layout | None:
        """The layout of divided tokens, if a layer is to read and give it; None: it is not."""
        shape = layer.output_shape
        for one in preferred if len(shape) == 2 else ():
            whole = one.group_size > 1 and one.placement == Replicate()
            if whole or is_by_tokens(one, shape):
                layout = by_tokens(shape, one.group_size, self.tokens)
                return layout if can_keep(layer, layout) else None
        return None

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
            while name not in self.graph.sources:
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


@dataclass(frozen=True)
class Flow:
    """The placements that follow from a plan.

    Attributes:
        inputs: the layout in which each layer reads its inputs, or its first tensor (`read`).
        edges: the conversions between each (producer, reader), in order. Readers whose conversions
            start alike share them.
        ways: the operations that are cut as trying them has shown, each with the way and with the
            pieces of each rank of a group.
        apart: the layouts in which these read their inputs, by (producer, reader).
    """

    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    edges: Mapping[tuple[str, str], tuple[Conversion, ...]]
    returns: Mapping[str, tuple[Conversion, ...]]
    weights: Mapping[str, WeightPlacement]
    ways: Ways
    apart: Mapping[tuple[str, str], Layout]

    def read(self, name: str, reader: str) -> Layout:
        """The layout in which a layer reads the output of another."""
        return self.apart.get((name, reader), self.inputs[reader])

    def returned(self, name: str) -> Layout:
        """The layout in which the model returns this output."""
        steps = self.returns[name]
        return steps[-1].target if steps else self.outputs[name]


def flow_of(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    held: Mapping[str, Layout] = MappingProxyType({}),
    tokens: Tokens = False,
) -> Flow:
    """Places every activation and weight of `graph` under `choices`; other layers are replicated.

    Args:
        held: the layouts in which these layers must read, whatever their inputs' layouts.
    """
    placing = Placing(graph, choices, held, tokens)
    placing.place()
    free = [layer for layer in graph.layers if layer.name not in placing.schemes]
    ways, apart = cut_through(graph, free, placing.inputs)
    for name in (name for name, (way, _) in ways.items() if not way.of_tokens):
        of_group = Layout(placing.inputs[name].group_size, Replicate())
        for one in read_whole(graph, graph[name]):
            placing.inputs[one.name] = placing.outputs[one.name] = of_group
    edges, returns = conversions(graph, choices, placing.inputs, placing.outputs, apart)
    weights: dict[str, WeightPlacement] = {}
    whole: dict[Hashable, WeightPlacement] = {}  # the placement of most weights of most plans
    for layer in graph.layers:
        read = placing.inputs[layer.name]
        for weight in layer.weights:
            if read is not ROWS:
                weights[weight.name] = place_weight(layer, weight, read, choices)
                continue
            look = weight.shape, weight.dtype, weight.trainable
            known = whole.get(look)
            if known is None:
                known = whole[look] = place_weight(layer, weight, read, choices)
            weights[weight.name] = known
    return Flow(placing.inputs, placing.outputs, edges, returns, weights, ways, apart)


def conversions(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
    apart: Mapping[tuple[str, str], Layout],
) -> tuple[dict[tuple[str, str], tuple[Conversion, ...]], dict[str, tuple[Conversion, ...]]]:
    """The conversions on every edge; readers are visited before their inputs, as gradients flow.

    Args:
        apart: the layouts in which some (producer, reader) read something else.
    """
    edges: dict[tuple[str, str], tuple[Conversion, ...]] = {}
    carried: dict[str, Gradient] = {}  # how the gradient of each layer's output arrives

    def arrives(reader: Layer) -> Gradient:
        """How the gradient of what `reader` reads leaves it."""
        layout = inputs[reader.name]
        if layout == ROWS or layout.placement != Replicate():
            return "same"
        choice = choices.get(reader.name)
        if choice is not None and choice.group_size > 1:
            return "partial" if choice.sums_back(outputs[reader.name]) else "same"
        return carried[reader.name] if reader.kind in CARRIES_PARTIAL else "same"

    for name in [*(layer.name for layer in reversed(graph.layers)), *graph.sources]:
        source, names = outputs[name], graph.consumers[name]
        if source is ROWS and all([inputs[reader] is ROWS for reader in names]):
            carried[name] = "same"  # most activations of most plans
            edges.update({(name, reader): () for reader in names})
            continue
        shape, rows = graph.shape_of(name), graph.rows_of(name)
        may_carry = name not in graph.sources and graph[name].kind in CARRIES_PARTIAL
        may_carry = may_carry and (name not in choices or choices[name].group_size == 1)
        readers = [graph[reader] for reader in names]
        by_target: dict[Layout, list[Layer]] = {}
        for reader in readers:
            target = apart.get((name, reader.name), inputs[reader.name])
            by_target.setdefault(target, []).append(reader)
        carried[name] = "same"
        for target, group in by_target.items():
            if rows == 0:  # the same on every rank: nothing to convert
                learns = name in graph.learning and source.group_size > 1
                for reader in group:
                    summed = learns and (name, reader.name) in apart
                    edges[name, reader.name] = (summed_over(source, shape),) if summed else ()
                continue
            summands = [reader for reader in group if arrives(reader) == "partial"]
            if target == source and not summands:  # most edges of most plans
                edges.update({(name, reader.name): () for reader in group})
                continue
            all_summands = len(summands) == len(group)
            if target == source and all_summands and len(by_target) == 1 and may_carry:
                if name not in graph.outputs:
                    carried[name] = "partial"
                    edges.update({(name, reader.name): () for reader in group})
                    continue
            passing = crossings(source, target, [r in summands for r in group], shape, rows)
            for reader, steps in zip(group, passing, strict=True):
                edges[name, reader.name] = steps

    returns: dict[str, tuple[Conversion, ...]] = {}
    for name in graph.outputs:
        shape, source = graph[name].output_shape, outputs[name]
        target = returned(graph, name, source)
        returns[name] = _steps(source, target, "same", shape, graph[name].rows)
    return edges, returns


def summed_over(whole: Layout, shape: tuple[int, ...]) -> Conversion:
    """The sum of a parameter's gradients over a group, each of whose ranks reads it for its pieces.

    Args:
        whole: the layout of the parameter, which all ranks of the group hold.
    """
    return Conversion(whole, whole, "partial", shape, 0)


def crossings(
    source: Layout, target: Layout, summands: Sequence[bool], shape: tuple[int, ...], rows: int
) -> list[tuple[Conversion, ...]]:
    """The conversions to each of the readers that read one activation in the same layout.

    Args:
        summands: whether the gradient of each reader comes back as partial sums [readers].
    """
    merged: Gradient = "partial" if all(summands) and target != source else "same"
    steps = _steps(source, target, merged, shape, rows)
    copy = Conversion(target, target, "partial", shape, rows)
    return [(*steps, copy) if sums and merged == "same" else steps for sums in summands]


def returned(graph: Graph, name: str, source: Layout) -> Layout:
    """The layout in which a model returns an output of this one: sharded classes stay so.

    So do those of every token, where the model reads token ids: the loss needs no whole scores.
    """
    dims = len(graph[name].output_shape)
    if dims > 1 and not (dims == 2 and graph.scores_tokens):
        return ROWS
    match source.placement:
        case Replicate():
            return source
        case Shard(dim=dim) if dim == dims:
            return source
        case _:
            return ROWS


def _steps(
    source: Layout, target: Layout, gradient: Gradient, shape: tuple[int, ...], rows: int
) -> tuple[Conversion, ...]:
    path = route(source, target)
    starts = (source, *path)
    return tuple(
        Conversion(
            _in_one_block(start),
            _in_one_block(end),
            gradient if end is path[-1] else "same",
            shape,
            rows,
            (_blocks(start), _blocks(end)),
        )
        for start, end in zip(starts, path, strict=False)
    )


def _blocks(layout: Layout) -> int:
    return layout.placement.blocks if isinstance(layout.placement, Shard) else 1


def _in_one_block(layout: Layout) -> Layout:
    if _blocks(layout) == 1:
        return layout
    assert isinstance(layout.placement, Shard)
    return Layout(layout.group_size, layout.placement.in_one_block)
