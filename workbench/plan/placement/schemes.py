"""How the ranks of a group divide one layer: what a scheme is, and the built-in ones.

A scheme says four things of a layer: which placements its input and output have over the group,
what each rank holds of its weights, what a rank computes, and what share of the work that is. All
else follows from them: the conversions before and after it, their traffic, memory, and time.

    input        a rank reads                      its gradient
    Replicate    all features                      a summand wherever the output is not Replicate
    Shard        its own features                  of its own features

    output       a rank gives
    Replicate    all features, as all others do
    Shard        its own features
    Partial      a summand of all features

The built-in ones are objects of classes that extend `Scheme`, and so is one of a person's own.

    scheme         of               input        weight               output
    replicate      all              ROWS         whole                ROWS
    shard_out      conv2d, linear   R            S(0)                 S over features
                   embedding        R            S(1)                 S over features
    shard_in       conv2d, linear   S features   S(1)                 P
                   embedding        R            S(0)                 P
    shard_heads    attention        R            whole heads of all   P
    duplicate      all              R            whole                R

A linear layer that holds its matrix as [in_features, out_features], as GPT-2's `Conv1D` does, has
it cut along the other dimension (`Layer.transposed`).

An embedding is a linear layer that reads a one at the token's place and zeros elsewhere: cut by its
input, a rank has some tokens of the vocabulary, and gives zeros for all others.

Of a grouped convolution, `shard_out` gives a rank whole groups: it reads and gives its own channels
(S, S), and no rank sums anything. Layers of other kinds follow their input (`rules.py`), unless a
plan gives them a scheme of a person's own.

Source: the column and row cuts of Megatron-LM (arXiv:1909.08053, sec. 3); unequal pieces are ours.

A scheme of a person's own, of which every statement is checked where it is made.

The rest of the house asks it as it asks a built-in one: a statement that cannot be is refused by
the names of scheme and layer, before anything runs. What can be, and yet is wrong, such as a piece
that is not the one that a rank computes with, is found by `cluster.verify`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from workbench.plan.extension.extension import Extension
from workbench.plan.graph.graph import Layer, Weight
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.placement import Partial, Placement, Replicate, Shard, apportion
from workbench.plan.placement.rules import SPLITTABLE, feature_dim


@dataclass(frozen=True)
class Division:
    """The division of a layer's units (channels, features, groups, heads) over a group.

    Attributes:
        group_size: the number of ranks of the group.
        sizes: the units of each rank [ranks], by the shares that a plan gives, or equal ones; ()
            where a scheme divides nothing. A rank may have none.
        given: whether the plan gives shares.
    """

    group_size: int
    sizes: tuple[int, ...] = ()
    given: bool = False

    @property
    def first(self) -> int:
        """The first rank of the group that has any units."""
        return next(rank for rank, size in enumerate(self.sizes) if size)


@lru_cache(maxsize=4096)
def divided(units: int, group_size: int, shares: tuple[float, ...] | None) -> Division:
    """The division of so many units by shares; None: equal ones."""
    sizes = apportion(units, shares or (1,) * group_size) if units else ()
    return Division(group_size, sizes, shares is not None)


def held_by(member: int, length: int, group_size: int) -> Shard:
    """All of a vector on one rank of a group, nothing on the others: what is added only once."""
    return Shard(0, tuple(length * (rank == member) for rank in range(group_size)))


class Scheme(Extension, ABC):
    """How the ranks of a group divide a layer.

    Objects are values: what a method returns depends on its arguments and on how the object was
    made, on nothing else, so that all ranks find the same. Shapes are those of the graph, without
    the batch; dimensions count the batch: dimension 1 of an image [rows, channels, height, width]
    is its channels.

    Attributes:
        summed_back: whether the gradient of an input that all ranks read whole comes back as
            summands, one of each rank, wherever the output is not whole on all of them.
    """

    kind: ClassVar[str] = "schemes"
    summed_back: bool = True

    @abstractmethod
    def takes(self, layer: Layer) -> bool:
        """Whether a layer of a graph can have this scheme, by its kind, target, shapes, groups."""

    @abstractmethod
    def units(self, layer: Layer) -> int:
        """The number of units that shares divide, such as channels; 0: it takes no shares."""

    @abstractmethod
    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        """The placements over the group of the layer's input and output.

        Args:
            layer: a layer that `takes` accepts.
            division: the units of each rank of the group.
            coming: the placement of the input over this group, before any conversion; None: it
                lies otherwise, or is not known. Reading it as it comes saves the conversion.
        """

    @abstractmethod
    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        """The placement over the group of one of the layer's weights: what a rank holds.

        Args:
            layer: the layer.
            weight: one of its parameters or buffers, of one dimension or more;
                `layer.within(weight)` is its name in the layer: "weight", "bias".
            division: the units of each rank of the group.
            read: the placement of the layer's input, as `layouts` gives it.
        """

    def local(self, module: Any, layer: Layer, division: Division, member: int) -> Any:
        """What one rank computes instead of the layer: an `nn.Module`.

        By default the layer's own module, with this rank's pieces of its weights and the sizes
        that follow from their shapes (`out_features`, `in_channels`, ...). It reads what this rank
        has of the input [rows, ...] and returns what this rank has of the output.

        Args:
            module: the layer's own module, cut so. A module that is returned instead must hold the
                same parameters and buffers under the same names, so that they are trained and
                saved.
            layer: the layer.
            division: the units of each rank of the group.
            member: the rank's number in its group.
        """
        return module

    def flops(
        self, layer: Layer, division: Division, member: int, read: Placement, given: Placement
    ) -> float:
        """The share of the layer's floating-point operations that one rank computes, 0 to 1.

        By default the fraction of the output that it gives. Where it gives a summand of all of it,
        the fraction of the input that it reads, or of the units where it reads all.
        """
        match read, given:
            case _, Shard() as cut:
                return cut.length(member) / cut.extent if cut.extent else 1.0
            case Shard() as cut, Partial():
                return cut.length(member) / cut.extent
            case _, Partial() if division.sizes:
                return division.sizes[member] / sum(division.sizes)
            case _:
                return 1.0

    def heads(self, layer: Layer, division: Division) -> tuple[int, ...] | None:
        """The heads of an attention layer that each rank has [ranks]; None: all of them."""
        return None


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
    """A rank has some filters, neurons or features. Groups stay together."""

    name = "shard_out"

    def takes(self, layer: Layer) -> bool:
        return layer.kind in ("conv2d", "linear", "embedding")

    def units(self, layer: Layer) -> int:
        if layer.groups > 1:
            return layer.groups
        if layer.output_units:
            return layer.output_units
        return layer.output_shape[feature_dim(layer.output_shape, layer.kind) - 1]

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        units = Shard(feature_dim(layer.output_shape, layer.kind), division.sizes)
        if layer.kind == "linear":
            return Replicate(), self._features(layer, division, units.dim)
        if layer.groups == 1:
            return Replicate(), units
        read = units.scaled(layer.input_shape[0] // layer.groups)
        return read, units.scaled(layer.output_shape[0] // layer.groups)

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        if layer.kind == "embedding":
            return Shard(1, division.sizes)
        if layer.kind == "linear":
            return self._features(layer, division, int(layer.transposed and len(weight.shape) > 1))
        return Shard(0, division.sizes).scaled(weight.shape[0] // self.units(layer))

    def _features(self, layer: Layer, division: Division, dim: int) -> Shard:
        """The features of a linear layer: whole heads, in each block of them."""
        blocks = layer.output_blocks
        each = layer.output_shape[-1] // (blocks * self.units(layer))
        return Shard(dim, division.sizes, blocks).scaled(each)


class ShardIn(Scheme):
    """A rank has some input features, or some tokens: columns of a matrix, rows of a table."""

    name = "shard_in"

    def takes(self, layer: Layer) -> bool:
        return layer.kind in ("conv2d", "linear", "embedding") and layer.groups == 1

    def units(self, layer: Layer) -> int:
        if layer.kind == "embedding":
            return layer.num_embeddings
        if layer.input_units:
            return layer.input_units
        return layer.input_shape[feature_dim(layer.input_shape, layer.kind) - 1]

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        if layer.kind == "embedding":
            return Replicate(), Partial()
        dim = feature_dim(layer.input_shape, layer.kind)
        if not division.given and isinstance(coming, Shard) and coming.dim == dim:
            if coming.blocks == 1:
                return coming, Partial()
        each = layer.input_shape[dim - 1] // self.units(layer)
        return Shard(dim, division.sizes).scaled(each), Partial()

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        if layer.kind == "embedding":
            return Shard(0, division.sizes)
        assert isinstance(read, Shard)
        if len(weight.shape) > 1:
            return Shard(0 if layer.transposed else 1, read.sizes)
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


T = TypeVar("T")

# Why no scheme of a person's own can have a layer of these kinds.
_REFUSED = {
    "batch_norm": "its statistics are those of the rows and channels that its input has",
    "parameter": "it reads no sample",
    "size": "it reads no sample",
}


class Stated(Scheme):
    """What an own scheme states, checked."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.name, self.summed_back = scheme, scheme.name, scheme.summed_back

    def takes(self, layer: Layer) -> bool:
        if _unsuitable(layer):
            return False
        return bool(self._asked(layer, "takes", lambda: self.scheme.takes(layer)))

    def refusal(self, layer: Layer) -> str:
        """Why a layer cannot have it."""
        why = _unsuitable(layer) or f"its `takes` refuses it ({layer.kind}, {layer.target})"
        return f"layer {layer.name!r} cannot have the scheme {self.name!r}: {why}"

    def units(self, layer: Layer) -> int:
        units = self._asked(layer, "units", lambda: self.scheme.units(layer))
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise self._error(layer, f"`units` must be an integer >= 0, got {units!r}")
        return units

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        both = self._asked(layer, "layouts", lambda: self.scheme.layouts(layer, division, coming))
        if not (isinstance(both, tuple) and len(both) == 2):
            raise self._error(
                layer, f"`layouts` must be (of the input, of the output), got {both!r}"
            )
        read, given = both
        self._check_activation(layer, "input", read, layer.input_shape, division)
        self._check_activation(layer, "output", given, layer.output_shape, division)
        if isinstance(read, Partial):
            raise self._error(layer, "its input is P, and no layer can read summands")
        for rank, size in enumerate(division.sizes):
            if size == 0 and layer.kind != "attention" and not _nothing(read, given, rank):
                raise self._error(
                    layer,
                    f"rank {rank} of a group would have none of the {sum(division.sizes)} units "
                    f"{division.sizes}, and yet read {read} and give {given}: every rank needs a "
                    f"unit",
                )
        return read, given

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        name = layer.within(weight)
        placement = self._asked(
            layer, "holds", lambda: self.scheme.holds(layer, weight, division, read)
        )
        what = f"`holds` places {name!r} {weight.shape}"
        match placement:
            case Shard():
                self._check_shard(layer, what, placement, weight.shape, division, first=0)
            case Replicate():
                given = self.layouts(layer, division, read)[1]
                alike = read == given == Replicate()
                if weight.trainable and layer.kind != "attention" and not alike:
                    raise self._error(
                        layer,
                        f"{what} whole on every rank, while each rank computes something else with "
                        f"it ({read} to {given}): its gradient would differ by rank; cut it, or "
                        f"hold it on one rank (`held_by`)",
                    )
            case _:
                raise self._error(layer, f"{what}: Replicate() or a Shard, got {placement!r}")
        return placement

    def local(self, module: Any, layer: Layer, division: Division, member: int) -> Any:
        return self._asked(
            layer, "local", lambda: self.scheme.local(module, layer, division, member)
        )

    def flops(
        self, layer: Layer, division: Division, member: int, read: Placement, given: Placement
    ) -> float:
        share = self._asked(
            layer, "flops", lambda: self.scheme.flops(layer, division, member, read, given)
        )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise self._error(layer, f"`flops` must be a share from 0 to 1, got {share!r}")
        return float(share)

    def heads(self, layer: Layer, division: Division) -> tuple[int, ...] | None:
        heads = self._asked(layer, "heads", lambda: self.scheme.heads(layer, division))
        if heads is not None and (len(heads) != division.group_size or sum(heads) != layer.heads):
            raise self._error(
                layer,
                f"`heads` must be the heads of {division.group_size} ranks, {layer.heads} in all, "
                f"got {heads!r}",
            )
        return heads

    def _asked(self, layer: Layer, method: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except PlanError:
            raise
        except Exception as error:  # whatever its own code raises
            raise self._error(
                layer, f"`{method}` raised {type(error).__name__}: {error}"
            ) from error

    def _error(self, layer: Layer, why: str) -> PlanError:
        return PlanError(f"layer {layer.name!r}, scheme {self.name!r}: {why}")

    def _check_activation(
        self,
        layer: Layer,
        which: str,
        placement: Placement,
        shape: tuple[int, ...],
        division: Division,
    ) -> None:
        if not isinstance(placement, Shard):
            if isinstance(placement, Replicate | Partial):
                return
            raise self._error(
                layer, f"the {which} is Replicate(), Partial() or a Shard, got {placement!r}"
            )
        what = f"`layouts` cuts the {which} {shape}"
        self._check_shard(layer, what, placement, (0, *shape), division, first=1)
        if placement.blocks > 1:
            raise self._error(
                layer,
                f"{what} in {placement.blocks} blocks: conversions move consecutive pieces of "
                f"activations; blocks are for weights",
            )

    def _check_shard(
        self,
        layer: Layer,
        what: str,
        cut: Shard,
        shape: tuple[int, ...],
        division: Division,
        first: int,
    ) -> None:
        if not first <= cut.dim < len(shape):
            dims = f"{first} to {len(shape) - 1}"
            raise self._error(layer, f"{what} along dimension {cut.dim}; there are {dims}")
        if len(cut.sizes) != division.group_size:
            raise self._error(
                layer,
                f"{what} into {len(cut.sizes)} pieces {cut.sizes} for a group of "
                f"{division.group_size} ranks",
            )
        if cut.extent != shape[cut.dim]:
            raise self._error(
                layer,
                f"{what} into {cut}, which are {cut.extent} elements of the {shape[cut.dim]} along "
                f"dimension {cut.dim}",
            )


def _nothing(read: Placement, given: Placement, member: int) -> bool:
    """Whether a rank reads nothing, or gives nothing."""
    return any(isinstance(cut, Shard) and cut.sizes[member] == 0 for cut in (read, given))


def _unsuitable(layer: Layer) -> str:
    """Why a layer can have no scheme of a person's own; "": it can."""
    if layer.kind in _REFUSED:
        return f"it is of kind {layer.kind!r}: {_REFUSED[layer.kind]}"
    if layer.rows == 0 or not layer.inputs:
        return "it depends on no sample"
    if layer.random and layer.kind != "attention":
        return "it draws random numbers, which would depend on the split"
    if not layer.calls_module:
        return f"it is a function ({layer.target}); a scheme is for a module of the model"
    if len(dict.fromkeys(layer.inputs)) > 1:
        return f"it reads several tensors ({', '.join(layer.inputs)})"
    return ""
