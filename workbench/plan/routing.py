"""The conversions on every edge of the graph, and where a gradient's summands are added."""

from collections.abc import Mapping, Sequence

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Conversion, Gradient, Layout, route
from workbench.plan.placement import Replicate, Shard
from workbench.plan.rules import CARRIES_PARTIAL, SPLITTABLE, SUMMED_BACK


def conversions(
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
            return "partial" if choices[reader.name].scheme in SUMMED_BACK else "same"
        return carried[reader.name] if reader.kind in CARRIES_PARTIAL else "same"

    for name in [*(layer.name for layer in reversed(graph.layers)), "input"]:
        source, names = outputs[name], graph.consumers[name]
        if source is ROWS and all([inputs[reader] is ROWS for reader in names]):
            carried[name] = "same"  # most activations of most plans
            edges.update({(name, reader): () for reader in names})
            continue
        shape = graph.input_shape if name == "input" else graph[name].output_shape
        rows = 1 if name == "input" else graph[name].rows
        may_carry = name != "input" and graph[name].kind in CARRIES_PARTIAL
        readers = [graph[reader] for reader in names]
        by_target: dict[Layout, list[Layer]] = {}
        for reader in readers:
            by_target.setdefault(inputs[reader.name], []).append(reader)
        carried[name] = "same"
        for target, group in by_target.items():
            if rows == 0:  # the same on every rank: nothing to convert
                edges.update({(name, reader.name): () for reader in group})
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
        returns[name] = _steps(source, returned(source, shape), "same", shape, graph[name].rows)
    return edges, returns


def crossings(
    source: Layout, target: Layout, summands: Sequence[bool], shape: tuple[int, ...], rows: int
) -> list[tuple[Conversion, ...]]:
    """The conversions to each of the readers that read one activation in the same layout.

    Args:
        source: the activation's layout.
        target: the readers'.
        summands: of each reader, whether its gradient comes back as summands.
        shape: one sample's shape of the activation.
        rows: rows of dimension 0 for each sample.
    """
    merged: Gradient = "partial" if all(summands) and target != source else "same"
    steps = _steps(source, target, merged, shape, rows)
    copy = Conversion(target, target, "partial", shape, rows)
    return [(*steps, copy) if sums and merged == "same" else steps for sums in summands]


def returned(source: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout in which a model returns what lies like this: cut classes stay cut."""
    stays = isinstance(source.placement, Shard) or source.placement == Replicate()
    return source if stays and len(shape) == 1 else ROWS


def _steps(
    source: Layout, target: Layout, gradient: Gradient, shape: tuple[int, ...], rows: int
) -> tuple[Conversion, ...]:
    path = route(source, target)
    starts = (source, *path)
    return tuple(
        Conversion(start, end, gradient if end is path[-1] else "same", shape, rows)
        for start, end in zip(starts, path, strict=False)
    )
