"""Deep models as few rows: layers in blocks, and equal blocks in stacks.

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

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from workbench.plan.graph import Graph, Layer

FEWEST = 40  # layers of a model that is worth folding
_JOINING = ("add", "mul", "op", "size")
_NUMBERED = re.compile(r"\d+$")


@dataclass(frozen=True)
class Node:
    """A row, and those that it folds.

    Attributes:
        kind: of row.
        label: what it is called below its parent.
        layers: indices in the graph, ascending.
        children: rows that it unfolds to; of a layer none.
        count: equal blocks that it stands for.
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
