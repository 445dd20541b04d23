"""Operations that are cut as trying them has shown: their layouts, and the pieces of each rank."""

from collections.abc import Iterable, Mapping, Sequence

from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.layout import ROWS, Layout
from workbench.plan.placement.placement import Replicate, Shard, apportion
from workbench.plan.placement.propagation import Propagation

Ways = dict[str, tuple[Propagation, tuple[int, ...]]]

Tokens = bool | tuple[float, ...]
"""Whether tokens are divided between cut layers; or their relative numbers, for each rank of a
group."""


def cut_through(
    graph: Graph, layers: Iterable[Layer], inputs: Mapping[str, Layout]
) -> tuple[Ways, dict[tuple[str, str], Layout]]:
    """(how operations are cut, in which layouts they read their inputs): see `Flow`.

    Args:
        graph: the model.
        layers: layers without schemes.
        inputs: the layout in which each of them reads its first tensor.
    """
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
    """The layout of the output of an operation that is cut; None: it is not.

    Args:
        layer: a layer without a scheme.
        read: the layout in which it reads its first tensor.
    """
    cut = way_of(layer, read)
    if cut is None:
        return None
    way, counts = cut
    return Layout(read.group_size, _cut(layer.output_shape, way.output, way.pieces, counts))


def read_first(layer: Layer, index: int, layout: Layout) -> Layout:
    """How an operation reads its first tensor where one of its inputs lies so; else ROWS.

    Args:
        layer: an operation with propagations.
        index: the number of the input.
        layout: the layout of that input, cut over a group.
    """
    cut = layout.placement
    assert isinstance(cut, Shard)
    for way in layer.propagations:
        counts = _counts(cut, way.pieces)
        if way.inputs[index] == (cut.dim, cut.blocks) and counts:
            first = _cut(layer.input_shape, _first(way), way.pieces, counts)
            return Layout(layout.group_size, first)
    return ROWS


def read_each(layer: Layer, read: Layout, shapes: Sequence[tuple[int, ...]]) -> tuple[Layout, ...]:
    """The layouts in which a layer without a scheme reads its inputs: mostly one for all.

    Args:
        layer: the layer.
        read: the layout in which it reads its first tensor.
        shapes: the shapes of its inputs, for one sample.
    """
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
        shape: the shape of one sample [tokens, features].
        group_size: the ranks of a group.
        tokens: the relative tokens of each rank of the group; True: equal ones.
    """
    shares = (1,) * group_size if isinstance(tokens, bool) else tokens
    return Layout(group_size, Shard(1, apportion(shape[0], shares)))


def is_by_tokens(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a layout of [rows, tokens, features] divides the tokens.

    Args:
        layout: the layout.
        shape: the shape of one sample.
    """
    return len(shape) == 2 and isinstance(layout.placement, Shard) and layout.placement.dim == 1


def way_of(layer: Layer, read: Layout) -> tuple[Propagation, tuple[int, ...]] | None:
    """How an operation is cut, and the pieces of each rank of the group; None: it is not.

    Args:
        layer: a layer without a scheme.
        read: the layout in which it reads its first tensor.
    """
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
