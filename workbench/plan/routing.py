"""The conversions on every edge of the graph, and where a gradient's summands are added."""

from collections.abc import Mapping

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
