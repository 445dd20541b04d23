"""A model's parameters as ranks hold them: their order and their pieces."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from workbench.plan.experiment import SGD, Experiment, Optimizer
from workbench.plan.placement import Replicate
from workbench.plan.plan import Plan
from workbench.plan.weights import WeightPlacement
from workbench.program.rows import Counts, tiled

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
    owners: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> "Pieces":
        """Those of an experiment's plan, in its precision."""
        plan = experiment.plan
        # Deep models repeat their blocks; placements that are cut are slow to hash.
        known: dict[Hashable, Counts] = {}
        sizes = {}
        for name, placed in plan.flow.weights.items():
            whole = isinstance(placed.placement, Replicate)
            look = (placed.shape, placed.dtype, None if whole else placed)
            if look not in known:
                element = itemsize(placed, experiment.precision)
                known[look] = piece(placed, plan.world_size, element)
            sizes[name] = known[look]
        return cls(plan.graph.trainable, sizes, plan.graph.owners)

    def by_layer(self, sizes: Mapping[str, Counts]) -> dict[str, Counts]:
        """Sums, over each layer's weights, of what `sizes` says of them."""
        parts: dict[str, list[Counts]] = {}
        owners = self.owners
        for name, size in sizes.items():
            owner = owners[name]
            if owner in parts:
                parts[owner].append(size)
            else:
                parts[owner] = [size]
        sums: dict[tuple[int, ...], Counts] = {}  # of the same pieces, as equal layers have them
        found = {}
        for owner, own in parts.items():
            which = tuple(map(id, own))
            if which not in sums:
                sums[which] = reduce(np.add, own)
            found[owner] = sums[which]
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
