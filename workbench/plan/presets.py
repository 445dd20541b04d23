"""Choices for whole models: the rule of `Plan.hybrid`, and why it says what it says of a layer.

Parameters against FLOPs. Cutting a layer over k ranks saves (1 - 1/k) of its parameters on every
rank, and of their gradients' traffic; it costs the traffic of its activations, which grow as its
FLOPs do. Convolutions, which apply each weight at every position, are replicated. Linear layers
and attention are the candidates, and a candidate is cut where it

    is large    has at least 1/100 of the parameters of the model's largest candidate
    is heavy    share of the model's parameters >= 1/2 of its share of the model's FLOPs

Classifiers behind convolutions are heavy by far. So are a transformer's blocks, by a factor of
about one: every weight meets every token. The first stages of Swin and ConvNeXt are not: their
images are large, and their weights few.

Source: SplitBrain (arXiv:2112.15317) for the division of a network; the thresholds are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer

Reason = Literal["cut", "convolution", "small", "light", "shared"]

CANDIDATES = ("linear", "attention")
LARGE = 1 / 100
HEAVY = 1 / 2


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one layer that could be cut.

    Attributes:
        layer: the layer.
        parameters: its share of the model's parameters, 0 to 1.
        flops: its share of the model's FLOPs, 0 to 1.
        reason: "cut", or why it stays whole: a "convolution"; "small" or "light" (not heavy);
            or its weights are "shared" with another layer.
    """

    layer: Layer
    parameters: float
    flops: float
    reason: Reason


def hybrid(graph: Graph, group_size: int) -> dict[str, LayerPlan]:
    """What the rule cuts, over groups; linear layers in column-row pairs, attention by heads."""
    if group_size == 1:
        return {}
    choices: dict[str, LayerPlan] = {}
    for layer in (verdict.layer for verdict in verdicts(graph) if verdict.reason == "cut"):
        above = _fed_by(graph, layer)
        if layer.kind == "attention":
            scheme = "shard_heads"
        elif above in choices and choices[above].scheme == "shard_out":
            scheme = "shard_in"
        else:
            scheme = "shard_out"
        choices[layer.name] = LayerPlan(scheme, group_size)
    return choices


def verdicts(graph: Graph) -> tuple[Verdict, ...]:
    """The rule's verdict on every layer with parameters that could be cut, in order."""
    held = [layer for layer in graph.layers if layer.parameters]
    candidates = [layer for layer in held if layer.kind in CANDIDATES]
    largest = max((layer.parameters for layer in candidates), default=1)
    found = []
    for layer in held:
        if layer.kind not in (*CANDIDATES, "conv2d"):
            continue
        parameters = layer.parameters / graph.parameters
        flops = layer.flops / max(graph.flops, 1)
        reason: Reason = "cut"
        if layer.kind == "conv2d":
            reason = "convolution"
        elif layer.name in graph.shares_weights:
            reason = "shared"
        elif layer.parameters < LARGE * largest:
            reason = "small"
        elif parameters < HEAVY * flops:
            reason = "light"
        found.append(Verdict(layer, parameters, flops, reason))
    return tuple(found)


def followed(graph: Graph, choices: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
    """What the rule would choose where these choices were (mostly) made by it; else nothing."""
    cut = {name: choice for name, choice in choices.items() if choice.scheme != "replicate"}
    if not cut:
        return {}
    sizes = [choice.group_size for choice in cut.values()]
    ruled = hybrid(graph, max(set(sizes), key=lambda k: (sizes.count(k), k)))
    agreed = sum(name in cut and alike(cut[name], choice) for name, choice in ruled.items())
    return ruled if 2 * agreed >= len(cut.keys() | ruled.keys()) else {}


def alike(one: LayerPlan, other: LayerPlan) -> bool:
    """Whether two choices cut a layer in the same way."""
    first, second = ((c.scheme, c.group_size, c.shares) for c in (one, other))
    return first == second


def _fed_by(graph: Graph, layer: Layer) -> str:
    """The layer whose output reaches this one through element-wise layers only."""
    name = layer.inputs[0]
    while name != "input" and graph[name].kind in ("elementwise", "dropout"):
        if len(graph.consumers[name]) > 1:
            return name
        name = graph[name].inputs[0]
    return name
