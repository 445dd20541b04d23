"""The placement of every activation and weight, and the conversions, from a plan's choices.

Three passes over the graph:

    prefer    from the outputs up: the layout that each layer prefers for its input. Only
              a pending sum (P) has to choose a target without a reason of its own; it takes
              what its reader prefers.
    place     from the input down: each layer's input and output layout. Layers with a
              scheme have theirs; the others keep their input's.
    route     each edge whose two ends differ gets its conversions, and each edge over which a
              gradient comes back as summands gets the sum, as far up as it may wait.

A gather is placed where its tensor is smallest: VGG at 32x32 pools 512 features to 25,088 just
before its classifier, so the rows are gathered before that pool.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import ROWS, Conversion, Gradient, Layout, route
from workbench.plan.placement.placement import Replicate, Shard
from workbench.plan.placement.placing import Placing
from workbench.plan.placement.rules import CARRIES_PARTIAL
from workbench.plan.placement.weights import WeightPlacement, place_weight


@dataclass(frozen=True)
class Flow:
    """The placements that follow from a plan.

    Attributes:
        inputs: the layout in which each layer reads its inputs.
        outputs: the layout of each layer's output ("input": the model's own input).
        edges: the conversions between each (producer, reader), in order. Readers whose conversions
            start alike share them.
        returns: the conversions after each output of the model.
        weights: the placement of each weight, by its name in the state_dict.
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


def flow_of(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    held: Mapping[str, Layout] = MappingProxyType({}),
) -> Flow:
    """Places every activation and weight of `graph` under `choices`; other layers are replicated.

    Args:
        graph: the model.
        choices: the choices of its layers.
        held: the layouts in which these layers must read, whatever their inputs' layouts.
    """
    placing = Placing(graph, choices, held)
    placing.place()
    edges, returns = conversions(graph, choices, placing.inputs, placing.outputs)
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
    return Flow(placing.inputs, placing.outputs, edges, returns, weights)


def conversions(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> tuple[dict[tuple[str, str], tuple[Conversion, ...]], dict[str, tuple[Conversion, ...]]]:
    """The conversions on every edge; readers are visited before their inputs, as gradients flow."""
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

    for name in [*(layer.name for layer in reversed(graph.layers)), "input"]:
        source, names = outputs[name], graph.consumers[name]
        if source is ROWS and all([inputs[reader] is ROWS for reader in names]):
            carried[name] = "same"  # most activations of most plans
            edges.update({(name, reader): () for reader in names})
            continue
        shape = graph.input_shape if name == "input" else graph[name].output_shape
        rows = 1 if name == "input" else graph[name].rows
        may_carry = name != "input" and graph[name].kind in CARRIES_PARTIAL
        may_carry = may_carry and (name not in choices or choices[name].group_size == 1)
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
        target: the readers' layout.
        summands: whether the gradient of each reader comes back as partial sums [readers].
        shape: the shape of the activation for one sample.
        rows: the rows of dimension 0 for each sample.
    """
    merged: Gradient = "partial" if all(summands) and target != source else "same"
    steps = _steps(source, target, merged, shape, rows)
    copy = Conversion(target, target, "partial", shape, rows)
    return [(*steps, copy) if sums and merged == "same" else steps for sums in summands]


def returned(source: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout in which a model returns an output of this one: sharded classes stay so."""
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
