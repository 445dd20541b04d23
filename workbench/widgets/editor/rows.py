"""What a plan says of each layer, as columns, and how the layers of a deep model are folded.

Columns are facts, which never change, and cells, which edits do. Layers lie in blocks, and equal
blocks in stacks:

    stack    layer3.1 … 35, 35 equal blocks
      like     conv1, in each of the 35 blocks
        layer    layer3.1.conv1
        layer    layer3.2.conv1 ...
    block    layer3.0, of which there is no second
      layer    layer3.0.conv1 ...
    layer    conv1

Every layer is the leaf of one branch, so that what rows say adds up. A block is a run of layers
whose module paths begin alike, up to a numbered part: "layer3.1", "encoder.layers.encoder_layer_0".
Of several such parts the outermost one counts that makes blocks of equal structure. What is added
up or reshaped between two layers of a block belongs to it.
"""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.placement.flow import WeightPlacement, heads_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Replicate
from workbench.plan.placement.rules import SPLITTABLE
from workbench.plan.plans.plan import Plan
from workbench.widgets.editor.target import Offered

Columns = dict[str, list[Any]]

MOST_RANKS = 16  # whose pieces are drawn

# Whose change means that a layer is split otherwise than before, whatever its own choice.
PLACED = ("follows", "pieces", "arrives")


def facts(graph: Graph, offered: Offered) -> Columns:
    """What a model says of its layers, and which of the schemes on offer each can have.

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
        "schemes": [offered.of(graph, layer) for layer in layers],
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
        "scheme": [choice.name for choice in choices],
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
    if (heads := heads_of(layer, choice)) is not None:
        return "/".join(map(str, heads)) + " heads"
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


FEWEST = 40  # layers of a model that is worth folding
_JOINING = ("add", "mul", "op", "size")
_NUMBERED = re.compile(r"\d+$")


@dataclass(frozen=True)
class Node:
    """A row, and those that it folds.

    Attributes:
        layers: indices in the graph, ascending.
        count: number of equal blocks that it stands for.
    """

    kind: Literal["layer", "block", "stack", "like"]
    label: str
    layers: tuple[int, ...]
    children: tuple["Node", ...] = ()
    count: int = 1


def folded(graph: Graph) -> tuple[Node, ...]:
    """The rows of a model; without any folds where it is small."""
    layers = graph.layers
    if len(layers) < FEWEST:
        return tuple(_leaf(index, layer.name) for index, layer in enumerate(layers))
    prefixes = _prefixes(layers)
    runs = [
        (prefix, [index for index, _ in run])
        for prefix, run in groupby(enumerate(prefixes), key=lambda pair: pair[1])
    ]
    rows: list[Node] = []
    for _, alike in groupby(runs, key=lambda run: _likeness(layers, *run)):
        rows += _rows(layers, list(alike))
    return tuple(rows)


def _rows(layers: Sequence[Layer], runs: list[tuple[str, list[int]]]) -> Iterable[Node]:
    """Rows of runs that are equal: a stack, a block, or layers that belong to no block."""
    if len(runs) == 1:
        prefix, members = runs[0]
        if not prefix or len(members) == 1:
            return [_leaf(index, layers[index].name) for index in members]
        children = tuple(_leaf(index, _within(layers[index].name, prefix)) for index in members)
        return [Node("block", prefix, tuple(members), children)]
    every = tuple(index for _, members in runs for index in members)
    likes = []
    for place, first in enumerate(runs[0][1]):
        same = tuple(members[place] for _, members in runs)
        children = tuple(_leaf(index, layers[index].name) for index in same)
        label = _within(layers[first].name, runs[0][0])
        likes.append(Node("like", label, same, children, len(runs)))
    last = _NUMBERED.search(runs[-1][0])
    label = f"{runs[0][0]} … {last[0] if last else runs[-1][0]}"
    return [Node("stack", label, every, tuple(likes), len(runs))]


def _leaf(index: int, label: str) -> Node:
    return Node("layer", label, (index,))


def _within(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.")


def _likeness(layers: Sequence[Layer], prefix: str, members: list[int]) -> Hashable:
    """Equal for blocks to be stacked: of one family and one structure."""
    if not prefix or len(members) == 1:
        return (members[0],)
    return (_NUMBERED.sub("#", prefix), *(_structure(layers[index]) for index in members))


def _structure(layer: Layer) -> Hashable:
    return (layer.kind, layer.input_shape, layer.output_shape, layer.parameters, layer.target)


def _prefixes(layers: Sequence[Layer]) -> list[str]:
    """For each layer the block that it belongs to, or ""."""
    ways = [_ways(layer.name) for layer in layers]
    shapes: dict[str, list[Hashable]] = {}
    for layer, prefixes in zip(layers, ways, strict=True):
        for prefix in prefixes:
            shapes.setdefault(prefix, []).append(_structure(layer))
    families: dict[str, list[tuple[Hashable, ...]]] = {}
    for prefix, structure in shapes.items():
        families.setdefault(_NUMBERED.sub("#", prefix), []).append(tuple(structure))
    stacked = {
        family
        for family, blocks in families.items()
        if any(one == other and len(one) > 1 for one, other in pairwise(blocks))
    }
    found = []
    for prefixes in ways:
        repeats = [p for p in prefixes if _NUMBERED.sub("#", p) in stacked]
        found.append((repeats or prefixes[-1:] or [""])[0])
    return _joined(layers, found)


def _ways(name: str) -> list[str]:
    """Where a module's path can be cut: behind each numbered part, but the module's own."""
    parts = name.split(".")
    return [
        ".".join(parts[:end]) for end in range(1, len(parts)) if _NUMBERED.search(parts[end - 1])
    ]


def _joined(layers: Sequence[Layer], prefixes: list[str]) -> list[str]:
    """Functions have no module path: they belong to the block that they stand in, or follow."""
    following = [""] * len(prefixes)
    for index in range(len(prefixes) - 2, -1, -1):
        after = prefixes[index + 1]
        following[index] = after or following[index + 1]
    found = list(prefixes)
    for index, layer in enumerate(layers[1:], 1):
        before = found[index - 1]
        inside = before == following[index]
        if before and not found[index] and (layer.kind in _JOINING or inside):
            found[index] = before
    return found


_Alike = tuple[str, int, tuple[float, ...] | None]  # scheme, size of groups, shares


@dataclass(frozen=True)
class Run:
    """Layers next to each other that are split alike: one piece of the picture of devices.

    Attributes:
        scheme: scheme of those that can be split; norms between them count with them.
        held: number of parameters that each rank holds, of the ranks that are shown.
    """

    first: str
    last: str
    scheme: str
    group: int
    parameters: int
    held: tuple[int, ...]


def runs(plan: Plan, most_ranks: int = MOST_RANKS) -> tuple[Run, ...]:
    """What ranks 0, 1, ... hold, in the model's order."""
    found: list[tuple[_Alike, list[Layer], list[tuple[int, ...]]]] = []
    weights = plan.flow.weights
    ranks = range(min(plan.world_size, most_ranks))
    for layer in plan.graph.layers:
        if not layer.parameters:
            continue
        choice = plan.layers.get(layer.name, _WHOLE)
        placed = [weights[w.name] for w in layer.weights if w.trainable]
        split = any(not isinstance(one.placement, Replicate) for one in placed)
        group = max(one.group_size for one in placed)
        held = _held(placed, ranks) if split else (layer.parameters,) * len(ranks)
        alike = (choice.name, group, choice.shares)
        # Norms are a few parameters, and lie as what they follow.
        if not found or (alike != found[-1][0] and (layer.kind in SPLITTABLE or choice.is_own)):
            found.append((alike, [], []))
        _, layers, pieces = found[-1]
        layers.append(layer)
        pieces.append(held)
    return tuple(_run(*each) for each in found)


def _run(alike: _Alike, layers: list[Layer], pieces: list[tuple[int, ...]]) -> Run:
    scheme, group, _ = alike
    held = tuple(map(sum, zip(*pieces, strict=True)))
    parameters = sum(layer.parameters for layer in layers)
    return Run(layers[0].name, layers[-1].name, scheme, group, parameters, held)


def _held(placed: list[WeightPlacement], ranks: range) -> tuple[int, ...]:
    """Elements on each rank; ranks at one position of their groups hold the same."""
    size = math.lcm(*(one.group_size for one in placed))
    first = [sum(one.piece_numel(rank) for one in placed) for rank in ranks[:size]]
    return tuple(first[rank % size] for rank in ranks)
