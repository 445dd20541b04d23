"""Operations that are cut as trying them has shown: their layouts, and the pieces of each rank.

The placement rules: the layouts that each kind of layer can have; schemes are in `schemes.py`.

    kind                                   reads and keeps
    conv2d, linear, embedding, attention   the layouts of its scheme
    batch_norm, pool                       ROWS, R, S over channels
    elementwise, dropout, stochastic_depth ROWS, R, S along any dimension
    flatten                                ROWS, R, S over channels (channel-major: sizes scale)
    add, mul                               two equal layouts out of ROWS, R, S
    layer_norm, op                         ROWS; R where every input is R over the same group
    op with propagations                   S also, where trying it has shown so: attention by heads
    layer_norm, op of each token           S over tokens also
    parameter, size                        independent of the batch: ROWS

An unknown operation is never split by itself: each rank runs it on complete samples. A scheme of a
person's own may split it.
"""

from collections.abc import Iterable, Mapping, Sequence

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.graph.saved import Propagation
from workbench.plan.placement.placement import (
    ROWS,
    Layout,
    Partial,
    Replicate,
    Shard,
    apportion,
    volume,
)

Ways = dict[str, tuple[Propagation, tuple[int, ...]]]

Tokens = bool | tuple[float, ...]
"""Whether tokens are divided between cut layers; or their relative numbers, for each rank of a
group."""


def cut_through(
    graph: Graph, layers: Iterable[Layer], inputs: Mapping[str, Layout]
) -> tuple[Ways, dict[tuple[str, str], Layout]]:
    """(how operations are cut, in which layouts they read their inputs): see `Flow`."""
    ways: Ways = {}
    apart: dict[tuple[str, str], Layout] = {}
    for layer in layers:
        read = inputs[layer.name]
        way = way_of(layer, read)
        if way is not None:
            ways[layer.name] = way
            each = read_each(layer, read, [graph.shape_of(name) for name in layer.inputs])
            apart |= {(n, layer.name): one for n, one in zip(layer.inputs, each, strict=True)}
    return ways, apart


def read_whole(graph: Graph, reader: Layer) -> tuple[Layer, ...]:
    """What learns and has no rows, and only this operation reads: whole, where that is cut.

    These are parameters, and what is computed from them alone.
    """
    found: dict[str, Layer] = {}
    ways = reader.propagations
    waiting = [
        name
        for index, name in enumerate(reader.inputs)
        if ways and not any(way.inputs[index] for way in ways)
    ]
    while waiting:
        name = waiting.pop()
        if _is_read_once(graph, name):
            found[name] = graph[name]
            waiting += graph[name].inputs
    return tuple(found.values())


def _is_read_once(graph: Graph, name: str) -> bool:
    """Whether a value without rows learns, is read in one place, and so is all it is made of."""
    if name not in graph.learning or graph.rows_of(name) > 0 or len(graph.consumers[name]) > 1:
        return False
    layer = graph[name]
    if layer.kind != "parameter" and layer.parameters > 0:
        return False  # a module's
    return all(_is_read_once(graph, one) for one in layer.inputs if one in graph.learning)


def given(layer: Layer, read: Layout) -> Layout | None:
    """The layout of the output of an operation that is cut; None: it is not."""
    cut = way_of(layer, read)
    if cut is None:
        return None
    way, counts = cut
    return Layout(read.group_size, _cut(layer.output_shape, way.output, way.pieces, counts))


def read_first(layer: Layer, index: int, layout: Layout) -> Layout:
    """How an operation reads its first tensor where one of its inputs lies so; else ROWS."""
    cut = layout.placement
    assert isinstance(cut, Shard)
    for way in layer.propagations:
        counts = _counts(cut, way.pieces)
        if way.inputs[index] == (cut.dim, cut.blocks) and counts:
            first = _cut(layer.input_shape, _first(way), way.pieces, counts)
            return Layout(layout.group_size, first)
    return ROWS


def read_each(layer: Layer, read: Layout, shapes: Sequence[tuple[int, ...]]) -> tuple[Layout, ...]:
    """The layouts in which a layer without a scheme reads its inputs: mostly one for all."""
    cut = way_of(layer, read)
    if cut is None:
        return (read,) * len(layer.inputs)
    (way, counts), whole = cut, Layout(read.group_size, Replicate())
    return tuple(
        Layout(read.group_size, _cut(shape, cut, way.pieces, counts)) if cut else whole
        for cut, shape in zip(way.inputs, shapes, strict=True)
    )


def by_tokens(shape: tuple[int, ...], group_size: int, tokens: Tokens) -> Layout:
    """The layout over a group in which each rank has some tokens of all the group's rows.

    Args:
        tokens: the relative tokens of each rank of the group; True: equal ones.
    """
    shares = (1,) * group_size if isinstance(tokens, bool) else tokens
    return Layout(group_size, Shard(1, apportion(shape[0], shares)))


def is_by_tokens(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a layout of [rows, tokens, features] divides the tokens."""
    return len(shape) == 2 and isinstance(layout.placement, Shard) and layout.placement.dim == 1


def way_of(layer: Layer, read: Layout) -> tuple[Propagation, tuple[int, ...]] | None:
    """How an operation is cut, and the pieces of each rank of the group; None: it is not."""
    cut = read.placement
    for way in layer.propagations if isinstance(cut, Shard) else ():
        assert isinstance(cut, Shard)
        counts = _counts(cut, way.pieces)
        if _first(way) == (cut.dim, cut.blocks) and counts:
            return way, counts
    return None


def _first(way: Propagation) -> tuple[int, ...]:
    """How the first tensor is cut."""
    return next(read for read in way.inputs if read)


def _counts(cut: Shard, pieces: int) -> tuple[int, ...]:
    """How many equal pieces of a dimension each rank has; (): they are not whole ones."""
    each, rest = divmod(sum(cut.sizes), pieces)
    if rest or each == 0 or any(size % each for size in cut.sizes):
        return ()
    return tuple(size // each for size in cut.sizes)


def _cut(shape: tuple[int, ...], way: tuple[int, ...], pieces: int, counts: Sequence[int]) -> Shard:
    dim, blocks = way
    each = shape[dim - 1] // (blocks * pieces)
    return Shard(dim, tuple(count * each for count in counts), blocks)


SPLITTABLE = ("conv2d", "linear", "embedding", "attention")
# One tensor in, one out, the layout kept; backward is linear in the gradient, so that
# summands of a gradient may pass through before they are summed.
UNARY = ("elementwise", "dropout", "stochastic_depth", "pool", "flatten")
CARRIES_PARTIAL = (*UNARY, "add", "mul")


def feature_dim(shape: tuple[int, ...], kind: str) -> int:
    """The dimension of the features: channels of images, the last one of what has tokens."""
    return len(shape) if kind in ("linear", "embedding") else 1


def can_keep(layer: Layer, layout: Layout) -> bool:
    """Whether a layer that follows its input can read this layout and pass it on."""
    match layout.placement:
        case Partial():
            return False
        case Replicate():
            return True
        case Shard(dim=dim):
            if layer.kind in ("batch_norm", "pool", "flatten"):
                return dim == 1
            if layer.kind in ("elementwise", "dropout", "stochastic_depth", "add", "mul"):
                return True
            return way_of(layer, layout) is not None


def joins(layer: Layer) -> bool:
    """Whether a layer concatenates the features of several others."""
    return layer.target.endswith("cat")


def after(layer: Layer, layout: Layout) -> Layout:
    """The output's layout of a layer that keeps its input's."""
    if layer.kind == "size":
        return ROWS
    if layer.kind == "flatten" and isinstance(layout.placement, Shard):
        factor = layer.output_shape[0] // layer.input_shape[0]
        return Layout(layout.group_size, layout.placement.scaled(factor))
    return given(layer, layout) or layout


def before(layer: Layer, layout: Layout) -> Layout:
    """The layout of the input that gives this output, where there is one; else ROWS."""
    if layer.kind == "flatten" and isinstance(layout.placement, Shard):
        factor = layer.output_shape[0] // layer.input_shape[0]
        sizes = layout.placement.sizes
        if any(size % factor for size in sizes):
            return ROWS
        cut = Shard(1, tuple(size // factor for size in sizes))
        return Layout(layout.group_size, cut)
    if layer.kind in UNARY and can_keep(layer, layout):
        return layout
    return ROWS


def read_without_scheme(
    graph: Graph, layer: Layer, coming: Sequence[Layout], preferred: Layout, gathered: Layout | None
) -> Layout:
    """The layout in which a layer without a scheme reads all its inputs.

    Args:
        preferred: the layout that its readers prefer it to read in.
        gathered: the layout in which its input is gathered already for a later layer; None: it is
            not.
    """
    if layer.of_type:
        return coming[0]
    if not layer.inputs or layer.rows == 0 or layer.kind in ("parameter", "size"):
        return ROWS
    if layer.name in graph.shares_weights:
        return ROWS  # one placement for all that use the weights
    if gathered is not None:
        return gathered
    if preferred is ROWS and all([layout is ROWS for layout in coming]):
        return ROWS  # as most layers of most plans
    if layer.kind in (*UNARY, "batch_norm", "layer_norm"):
        if can_keep(layer, coming[0]):
            return coming[0]
        return preferred if can_keep(layer, preferred) else ROWS
    if layer.kind in ("add", "mul"):
        shapes = [graph.shape_of(name) for name in layer.inputs]
        every = (preferred, *coming, ROWS)
        candidates = [layout for layout in every if _shared(layer, shapes, layout)]
        return _least(graph, candidates, layer, coming, preferred)
    cuts = [
        read_first(layer, index, layout)
        for index, layout in enumerate(coming)
        if layer.propagations and isinstance(layout.placement, Shard)
    ]
    if any(cut != ROWS for cut in cuts):
        return _cut_as_it_comes(graph, layer, coming, preferred, cuts)
    if is_by_tokens(preferred, layer.output_shape):
        if any(layout.group_size == preferred.group_size for layout in coming):
            return preferred
    return _rows_or_whole(graph, layer, coming, preferred)


def _cut_as_it_comes(
    graph: Graph,
    layer: Layer,
    coming: Sequence[Layout],
    preferred: Layout,
    candidates: Sequence[Layout],
) -> Layout:
    """The layout of an operation that may be cut, and of which an input comes so.

    A cut of the first tensor is kept: that may be several tensors, which are not converted.

    Args:
        candidates: how it reads its first tensor where an input lies as it comes.
    """
    first = next(x for x, name in zip(coming, layer.inputs, strict=True) if graph.rows_of(name))
    if first in candidates:
        return first
    return _least(graph, (*candidates, ROWS), layer, coming, preferred)


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

    shapes = [graph.shape_of(name) for name in layer.inputs]

    def elements(target: Layout) -> float:
        each = read_each(layer, target, shapes)
        there = sum(map(volume, coming, each, shapes))
        return there + volume(after(layer, target), preferred, layer.output_shape)

    return min(different, key=elements)


def _shared(layer: Layer, shapes: Sequence[tuple[int, ...]], layout: Layout) -> bool:
    """Whether all inputs of an addition or product can have this layout at once."""
    if not isinstance(layout.placement, Shard):
        return can_keep(layer, layout)
    dim = layout.placement.dim
    return all(len(shape) >= dim and len(shape) == len(shapes[0]) for shape in shapes) and all(
        shape[dim - 1] == layout.placement.extent for shape in shapes
    )
