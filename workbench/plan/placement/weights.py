"""The placement of parameters and buffers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.graph import Layer, Weight
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import Layout
from workbench.plan.placement.placement import Replicate, Shard, apportion
from workbench.plan.placement.rules import SPLITTABLE

# The dimension and the number of blocks of heads in the weights of an attention layer. Weights that
# are not named here are replicated, such as a table of positions.
_HEADS_ALONG = {
    "in_proj_weight": (0, 3),  # torch.nn.MultiheadAttention: query, key, value
    "in_proj_bias": (0, 3),
    "out_proj.weight": (1, 1),
    "qkv.weight": (0, 3),  # torchvision's window attention (Swin)
    "qkv.bias": (0, 3),
    "proj.weight": (1, 1),
    "relative_position_bias_table": (1, 1),
    "logit_scale": (0, 1),
    "cpb_mlp.2.weight": (0, 1),
}
# Added to the sum over heads, once: by the first rank that has heads.
_ADDED_ONCE = ("out_proj.bias", "proj.bias")


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
            return placed(_on_one(weight, owner, k), k)
        if choice.scheme == "shard_heads":
            return placed(_by_heads(layer, weight, heads_of(layer, choice)), k)
    if isinstance(read.placement, Shard) and not whole:
        return placed(Shard(0, read.placement.sizes), k)
    return placed(Replicate(), k)


def heads_of(layer: Layer, choice: LayerPlan) -> tuple[int, ...]:
    """How many heads each rank of a group has of an attention layer under `shard_heads`."""
    return apportion(layer.heads, choice.shares or (1,) * choice.group_size)


def _by_heads(layer: Layer, weight: Weight, heads: tuple[int, ...]) -> Replicate | Shard:
    """The placement by heads: each rank has the weights of its heads.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3); unequal pieces are ours.
    """
    name = weight.name.removeprefix(f"{layer.name}.")
    if name in _ADDED_ONCE:
        owner = next(rank for rank, held in enumerate(heads) if held)
        return _on_one(weight, owner, len(heads))
    if name not in _HEADS_ALONG:
        return Replicate()
    dim, blocks = _HEADS_ALONG[name]
    return Shard(dim, heads, blocks).scaled(weight.shape[dim] // (blocks * layer.heads))


def _on_one(weight: Weight, owner: int, group_size: int) -> Shard:
    """All of a bias on one rank of a group, nothing on the others."""
    return Shard(0, tuple(weight.shape[0] * (rank == owner) for rank in range(group_size)))
