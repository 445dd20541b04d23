"""The built-in schemes, each of them whole.

    scheme         of               input        weight               output
    replicate      all              ROWS         whole                ROWS
    shard_out      conv2d, linear   R            S(0)                 S over features
    shard_in       conv2d, linear   S features   S(1)                 P
    shard_heads    attention        R            whole heads of all   P
    duplicate      all              R            whole                R

Of a grouped convolution, `shard_out` gives a rank whole groups: it reads and gives its own channels
(S, S), and no rank sums anything. Layers of other kinds follow their input (`rules.py`), unless a
plan gives them a scheme of a person's own.

Source: the column and row cuts of Megatron-LM (arXiv:1909.08053, sec. 3); unequal pieces are ours.
"""

from types import MappingProxyType

from workbench.plan.graph import Layer, Weight
from workbench.plan.placement.placement import Partial, Placement, Replicate, Shard
from workbench.plan.placement.rules import SPLITTABLE, feature_dim
from workbench.plan.placement.scheme import Division, Scheme, held_by


class Replicated(Scheme):
    """Every rank computes its own rows: the scheme of groups of one rank."""

    name = "replicate"

    def takes(self, layer: Layer) -> bool:
        return layer.kind in SPLITTABLE

    def units(self, layer: Layer) -> int:
        return 0

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        return Replicate(), Replicate()

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        return Replicate()


class Duplicated(Replicated):
    """Every rank of a group computes all rows of the group."""

    name = "duplicate"


class ShardOut(Scheme):
    """A rank has some filters or neurons: rows of the weight matrix. Groups stay together."""

    name = "shard_out"

    def takes(self, layer: Layer) -> bool:
        return layer.kind in ("conv2d", "linear")

    def units(self, layer: Layer) -> int:
        if layer.groups > 1:
            return layer.groups
        return layer.output_shape[feature_dim(layer.output_shape, layer.kind) - 1]

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        units = Shard(feature_dim(layer.output_shape, layer.kind), division.sizes)
        if layer.groups == 1:
            return Replicate(), units
        read = units.scaled(layer.input_shape[0] // layer.groups)
        return read, units.scaled(layer.output_shape[0] // layer.groups)

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        return Shard(0, division.sizes).scaled(weight.shape[0] // self.units(layer))


class ShardIn(Scheme):
    """A rank has some input features: columns of the weight matrix."""

    name = "shard_in"

    def takes(self, layer: Layer) -> bool:
        return layer.kind in ("conv2d", "linear") and layer.groups == 1

    def units(self, layer: Layer) -> int:
        return layer.input_shape[feature_dim(layer.input_shape, layer.kind) - 1]

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        dim = feature_dim(layer.input_shape, layer.kind)
        if not division.given and isinstance(coming, Shard) and coming.dim == dim:
            return coming, Partial()
        return Shard(dim, division.sizes), Partial()

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        assert isinstance(read, Shard)
        if len(weight.shape) > 1:
            return Shard(1, read.sizes)
        # The bias is added once: by the first rank that has a summand to add it to.
        first = next(rank for rank, size in enumerate(read.sizes) if size)
        return held_by(first, weight.shape[0], division.group_size)


class ShardHeads(Scheme):
    """A rank has whole heads of attention."""

    name = "shard_heads"

    # The dimension and the number of blocks of heads in the weights of an attention layer. Weights
    # that are not named here are replicated, such as a table of positions.
    _ALONG = MappingProxyType(
        {
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
    )
    # Added to the sum over heads, once: by the first rank that has heads.
    _ADDED_ONCE = ("out_proj.bias", "proj.bias")

    def takes(self, layer: Layer) -> bool:
        return layer.kind == "attention"

    def units(self, layer: Layer) -> int:
        return layer.heads

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        return Replicate(), Partial()

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        name = layer.within(weight)
        if name in self._ADDED_ONCE:
            return held_by(division.first, weight.shape[0], division.group_size)
        if name not in self._ALONG:
            return Replicate()
        dim, blocks = self._ALONG[name]
        each = weight.shape[dim] // (blocks * layer.heads)
        return Shard(dim, division.sizes, blocks).scaled(each)

    def heads(self, layer: Layer, division: Division) -> tuple[int, ...] | None:
        return division.sizes


BUILT_IN = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (Replicated(), ShardOut(), ShardIn(), ShardHeads(), Duplicated())
    }
)
SCHEMES = tuple(BUILT_IN)


def schemes_of(layer: Layer) -> tuple[str, ...]:
    """The built-in schemes that a layer can have; empty where it follows its input."""
    return tuple(name for name, scheme in BUILT_IN.items() if scheme.takes(layer))
