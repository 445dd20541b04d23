"""What a plan says of each layer, as columns: what never changes, and what edits change."""

from typing import Any

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.placement import Replicate
from workbench.plan.plan import Plan
from workbench.plan.rules import schemes_of
from workbench.plan.weights import heads_of

Columns = dict[str, list[Any]]

# Whose change means that a layer is split otherwise than before, whatever its own choice.
PLACED = ("follows", "pieces", "arrives")


def facts(graph: Graph) -> Columns:
    """What a model says of its layers.

    Columns: name, kind, input and output (one sample's shapes), parameters, flops, schemes that
    it can be given, and whether it sees samples, so that it can be recomputed.
    """
    layers = graph.layers
    shared = graph.shares_weights
    return {
        "name": [layer.name for layer in layers],
        "kind": [layer.kind for layer in layers],
        "input": ["×".join(map(str, layer.input_shape)) for layer in layers],
        "output": ["×".join(map(str, layer.output_shape)) for layer in layers],
        "parameters": [layer.parameters for layer in layers],
        "flops": [layer.flops for layer in layers],
        "schemes": [list(schemes_of(layer)) for layer in layers],
        "samples": [bool(layer.rows) for layer in layers],
        "shared": [layer.name in shared for layer in layers],
    }


def cells(plan: Plan) -> Columns:
    """What a plan says of each layer.

    Columns: scheme, group, shares (as given, "" for none), recompute; what follows from all
    choices together: follows (the layout of its output), pieces of its first weight, arrives
    (conversions of its inputs, "all_gather_rows over 4 of conv1"), segment (its number, or 0).
    """
    numbers = {name: i for i, names in enumerate(plan.segments, 1) for name in names}
    layers, outputs = plan.graph.layers, plan.flow.outputs
    choices = [plan.layers.get(layer.name, _WHOLE) for layer in layers]
    texts = {id(layout): str(layout) for layout in {id(x): x for x in outputs.values()}.values()}
    return {
        "scheme": [choice.scheme for choice in choices],
        "group": [choice.group_size for choice in choices],
        "shares": [shares_text(choice.shares) for choice in choices],
        "recompute": [choice.recompute for choice in choices],
        "follows": [texts[id(outputs[layer.name])] for layer in layers],
        "pieces": [_pieces(plan, *one) for one in zip(layers, choices, strict=True)],
        "arrives": [_arrives(plan, layer) for layer in layers],
        "segment": [numbers.get(layer.name, 0) for layer in layers],
    }


_WHOLE = LayerPlan()


def _pieces(plan: Plan, layer: Layer, choice: LayerPlan) -> str:
    """How the layer's own weight is cut: "" where it has none or is whole."""
    if choice.scheme == "shard_heads":
        return "/".join(map(str, heads_of(layer, choice))) + " heads"
    if not layer.weights:
        return ""
    placement = plan.flow.weights[layer.weights[0].name].placement
    return "" if isinstance(placement, Replicate) else "/".join(map(str, placement.sizes))


def _arrives(plan: Plan, layer: Layer) -> list[str]:
    edges = plan.flow.edges
    found: list[str] = []
    if not any([edges[producer, layer.name] for producer in layer.inputs]):
        return found  # as of most layers of most plans
    for producer in dict.fromkeys(layer.inputs):
        for step in edges[producer, layer.name]:
            if step.name != "copy_to" or step.gradient == "partial":
                found.append(f"{step.name} over {step.group_size} of {producer}")
    return found


def shares_text(shares: tuple[float, ...] | None) -> str:
    """Shares as people write them: "3 1"."""
    return "" if shares is None else " ".join(f"{share:g}" for share in shares)
