"""The placement of parameters and buffers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.graph import Layer, Weight
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import Layout
from workbench.plan.placement.placement import Replicate, Shard


@dataclass(frozen=True)
class WeightPlacement:
    """The placement of a parameter or buffer: rank r holds piece r % group_size of it."""

    placement: Replicate | Shard
    group_size: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the piece that this rank of the world holds."""
        if isinstance(self.placement, Replicate):
            return self.shape
        shape = list(self.shape)
        shape[self.placement.dim] = self.placement.length(rank % self.group_size)
        return tuple(shape)

    def piece_numel(self, rank: int) -> int:
        """The number of elements that this rank of the world holds."""
        return math.prod(self.piece_shape(rank))


def place_weight(
    layer: Layer, weight: Weight, read: Layout, choices: Mapping[str, LayerPlan]
) -> WeightPlacement:
    """A weight's placement from its layer's scheme, or from the layout that the layer follows."""

    def placed(placement: Replicate | Shard, group_size: int) -> WeightPlacement:
        return WeightPlacement(placement, group_size, weight.shape, weight.dtype, weight.trainable)

    k, choice = read.group_size, choices.get(layer.name)
    if len(weight.shape) == 0 or k == 1:
        return placed(Replicate(), k)
    if choice is not None and choice.group_size > 1:
        division = choice.division(layer)
        return placed(choice.meant.holds(layer, weight, division, read.placement), k)
    if isinstance(read.placement, Shard):
        return placed(Shard(0, read.placement.sizes), k)
    return placed(Replicate(), k)


def heads_of(layer: Layer, choice: LayerPlan | None) -> tuple[int, ...] | None:
    """How many heads each rank of a group has of an attention layer; None: all of them."""
    if choice is None or choice.group_size == 1 or layer.kind != "attention":
        return None
    return choice.meant.heads(layer, choice.division(layer))
