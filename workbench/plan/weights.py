"""Where parameters and buffers lie."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Layer, Weight
from workbench.plan.layout import Layout
from workbench.plan.placement import Replicate, Shard, apportion
from workbench.plan.rules import SPLITTABLE


@dataclass(frozen=True)
class WeightPlacement:
    """Where one parameter or buffer lies: rank r holds piece r % group_size of `placement`."""

    placement: Replicate | Shard
    group_size: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece that this rank of the world holds."""
        if isinstance(self.placement, Replicate):
            return self.shape
        shape = list(self.shape)
        shape[self.placement.dim] = self.placement.length(rank % self.group_size)
        return tuple(shape)

    def piece_numel(self, rank: int) -> int:
        """Elements that this rank of the world holds."""
        return math.prod(self.piece_shape(rank))


def place_weight(
    layer: Layer, weight: Weight, read: Layout, choices: Mapping[str, LayerPlan]
) -> WeightPlacement:
    """A weight's placement from its layer's scheme, or from the layout that the layer follows."""

    def placed(placement: Replicate | Shard, group_size: int) -> WeightPlacement:
        return WeightPlacement(placement, group_size, weight.shape, weight.dtype, weight.trainable)

    k = read.group_size
    whole = len(weight.shape) == 0 or k == 1
    if layer.kind in SPLITTABLE and not whole:
        choice = choices[layer.name]
        if choice.scheme == "shard_out":
            # Of a grouped convolution, a rank holds whole groups.
            units = layer.groups if layer.groups > 1 else weight.shape[0]
            cut = Shard(0, apportion(units, choice.shares or (1,) * k))
            return placed(cut.scaled(weight.shape[0] // units), k)
        if choice.scheme == "shard_in":
            assert isinstance(read.placement, Shard)
            if len(weight.shape) > 1:
                return placed(Shard(1, read.placement.sizes), k)
            # The bias is added once: by the first rank that has a summand to add it to.
            owner = next(r for r, size in enumerate(read.placement.sizes) if size)
            return placed(Shard(0, tuple(weight.shape[0] * (r == owner) for r in range(k))), k)
    if isinstance(read.placement, Shard) and not whole:
        return placed(Shard(0, read.placement.sizes), k)
    return placed(Replicate(), k)
