"""A model's parameters as ranks hold them: their order and their pieces."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from workbench.plan.experiment import SGD, Experiment, Optimizer
from workbench.plan.graph import Graph
from workbench.plan.placement import Replicate
from workbench.plan.plan import Plan
from workbench.plan.weights import WeightPlacement
from workbench.predict.rows import Counts, tiled

BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}  # of an element of a weight, or of an image
# Linear layers with as large a weight write its gradient where the last step's was.
KEEPS_GRADIENT_BYTES = 2**22


@dataclass(frozen=True)
class Pieces:
    """What ranks hold of an experiment's weights.

    Attributes:
        names: of all parameters, in the order of the cut model's modules, which buckets follow.
        sizes: bytes on each rank, by the name of the parameter or buffer.
        owners: the layer of each of them.
    """

    names: tuple[str, ...]
    sizes: dict[str, Counts]
    owners: dict[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> "Pieces":
        """Those of an experiment's plan, in its precision."""
        plan = experiment.plan
        sizes = {
            name: piece(placed, plan.world_size, itemsize(placed, experiment.precision))
            for name, placed in plan.flow.weights.items()
        }
        owners = {w.name: layer.name for layer in plan.graph.layers for w in layer.weights}
        return cls(trainable_names(plan.graph), sizes, owners)

    def by_layer(self, sizes: Mapping[str, Counts]) -> dict[str, Counts]:
        """Sums, over each layer's weights, of what `sizes` says of them."""
        found: dict[str, Counts] = {}
        for name, size in sizes.items():
            owner = self.owners[name]
            found[owner] = found[owner] + size if owner in found else size
        return found


def piece(placed: WeightPlacement, world_size: int, element: int = 1) -> Counts:
    """Bytes of a weight that each rank holds, if an element has so many."""
    numel = math.prod(placed.shape) * element
    if isinstance(placed.placement, Replicate):
        return np.broadcast_to(np.int64(numel), world_size)  # as small for very many ranks
    others = numel // max(placed.shape[placed.placement.dim], 1)
    sizes = [placed.placement.length(rank) for rank in range(placed.group_size)]
    return tiled(sizes, world_size) * others


def itemsize(placed: WeightPlacement, precision: str) -> int:
    """Bytes of an element: floating-point weights have the experiment's precision."""
    if placed.dtype.startswith(("float", "bfloat")):
        return BYTES[precision]
    return {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4}.get(placed.dtype, 8)


@dataclass
class _Node:
    """A module of the model: what it holds itself, then its children, both as they came."""

    own: dict[str, str] = field(default_factory=dict)
    children: dict[str, "_Node"] = field(default_factory=dict)

    def at(self, path: list[str]) -> "_Node":
        node = self
        for name in path:
            node = node.children.setdefault(name, _Node())
        return node

    def collect(self, names: dict[str, None]) -> None:
        names.update(dict.fromkeys(self.own.values()))
        for child in self.children.values():
            child.collect(names)


def trainable_names(graph: Graph) -> tuple[str, ...]:
    """Names of all parameters in the order of the cut model's modules, which buckets follow."""
    root = _Node()
    aliases = {
        alias: weight.name
        for layer in graph.layers
        for weight in layer.weights
        for alias in weight.aliases
        if weight.trainable
    }
    for layer in graph.layers:
        root.at(layer.name.split("."))
        mine = [(weight.name, weight.name) for weight in layer.weights if weight.trainable]
        borrowed = [pair for pair in aliases.items() if pair[0].startswith(f"{layer.name}.")]
        for path, name in [*borrowed, *mine]:
            *modules, leaf = path.split(".")
            root.at(modules).own[leaf] = name
    names: dict[str, None] = {}  # a tied weight stands where it comes first
    root.collect(names)
    return tuple(names)


def tail_names(plan: Plan) -> set[str]:
    """Parameters behind the gather."""
    inside = frozenset() if plan.tail is None else plan.tail.layers
    layers = (layer for layer in plan.graph.layers if layer.name in inside)
    return {weight.name for layer in layers for weight in layer.weights if weight.trainable}


def copies(optimizer: Optimizer) -> int:
    """How often an optimizer keeps a number of a parameter's size for it."""
    if isinstance(optimizer, SGD):
        return int(optimizer.momentum > 0)
    return 2
