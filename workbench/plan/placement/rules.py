"""The placement rules: the layouts that each kind of layer can have; schemes are in `schemes.py`.

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

from collections.abc import Sequence

from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.layout import ROWS, Layout, volume
from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.placement.propagated import (
    given,
    is_by_tokens,
    read_each,
    read_first,
    way_of,
)

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
        graph: the graph that the layer is in.
        layer: a layer that cannot be split by itself.
        coming: the layouts of its inputs before any conversion.
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
        graph: the graph that the layer is in.
        layer: the operation.
        coming: the layouts of its inputs before any conversion.
        preferred: the layout that its readers prefer it to read in.
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
