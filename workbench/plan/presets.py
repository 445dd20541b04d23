"""Choices for whole models."""

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer

# Linear layers with less than this part of all linear parameters stay replicated.
WORTH_CUTTING = 0.01


def hybrid(graph: Graph, group_size: int) -> dict[str, LayerPlan]:
    """Linear layers in column-row pairs over groups, everything else replicated."""
    if group_size == 1:
        return {}
    own = [layer for layer in graph.layers if layer.name not in graph.shares_weights]
    linear = [layer for layer in own if layer.kind == "linear"]
    threshold = WORTH_CUTTING * sum(layer.parameters for layer in linear)
    choices: dict[str, LayerPlan] = {}
    for layer in linear:
        if layer.parameters < threshold:
            continue
        above = _fed_by(graph, layer)
        paired = above in choices and choices[above].scheme == "shard_out"
        choices[layer.name] = LayerPlan("shard_in" if paired else "shard_out", group_size)
    return choices


def _fed_by(graph: Graph, layer: Layer) -> str:
    """The layer whose output reaches this one through element-wise layers only."""
    name = layer.inputs[0]
    while name != "input" and graph[name].kind in ("elementwise", "dropout"):
        if len(graph.consumers[name]) > 1:
            return name
        name = graph[name].inputs[0]
    return name
