"""Choices for whole models: the rule of `Plan.filters`, heterogeneous model parallelism.

Every rank sees every row of its group, and computes its share of every layer's filters, so that
one vector of relative speeds balances all layers. Layers alternate:

    P    shard_out    reads whole features, gives its own filters          no communication
    R    shard_in     reads its own channels, gives summands of all        one all-reduce

A layer that reads sharded features becomes R, any other P. Between the two everything that acts on
each channel by itself keeps the sharding: batch norm, ReLU, pools, flatten, depthwise convolutions
(which are P of the same sharding), sums of two layers that are sharded alike, and the products of
squeeze-and-excitation. A layer that reads P's filters and needs all of them gathers them. The layer
that gives the model's result, where it reads whole features, is replicated. Attention is sharded by
heads.

A layer that shares its weights, or whose weights evaluation reads otherwise than training, is
replicated, too.

Filters are divided in grains, since kernels compute 8 or 16 channels at a time: a layer with
less than `GRAINS` of them for each rank gets smaller ones, by halves. A layer with fewer filters
than ranks leaves ranks without any: they take part in every collective, and the result is the same.

Source: Moreno-Alvarez et al. 2021 (doi:10.1016/j.neucom.2021.01.125), the alternation of its
Fig. 5; residual, depthwise and excited layers and the grain are ours.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from workbench.plan.errors import PlanError
from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.division import checked_shares
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.rules import SPLITTABLE, UNARY, feature_dim
from workbench.plan.placement.tied import kept_whole

GRAINS = 4

Shares = Sequence[float] | Mapping[str, Sequence[float]] | None


def filters(graph: Graph, group_size: int, shares: Shares, grain: int) -> dict[str, LayerPlan]:
    """The choice of each layer.

    Args:
        graph: the model.
        group_size: the number of ranks that divide the filters.
        shares: the relative filters of each rank of a group; or such for each pattern of layer
            names, of which the first match counts; None, or no match: equal.
        grain: the filters that stay together.

    Raises:
        PlanError: a pattern that matches no layer which can be split.
    """
    names = [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
    for pattern in shares if isinstance(shares, Mapping) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"shares are given for {pattern!r}, which is no layer that can be split; there "
                f"are {', '.join(names)}"
            )
    if group_size == 1:
        return {}
    rule = _Alternation(graph, group_size, shares, grain)
    return {name: choice for layer in graph.layers for name, choice in rule.choice(layer)}


def shares_of_rows(shares: Shares, world_size: int, group_size: int) -> tuple[float, ...] | None:
    """The shares of rows that go with these shares of filters; None: equal.

    Raises:
        PlanError: shares, or those of a pattern, that are not `group_size` numbers >= 0.
    """
    every = shares if isinstance(shares, Mapping) else {"": shares}
    found = [checked_shares(given, group_size) for given in every.values()]
    if isinstance(shares, Mapping) or found[0] is None:
        return None
    return found[0] * (world_size // group_size)


def grain_of(length: int, ranks: int, grain: int) -> int:
    """The filters that stay together: a grain, halved until there are enough of them."""
    while grain > 1 and length < GRAINS * grain * ranks:
        grain //= 2
    return grain


def in_grains(length: int, shares: Sequence[float], grain: int) -> tuple[int, ...]:
    """Whole sizes near `shares`, with sum `length`: multiples of a grain, and one remainder.

    Args:
        length: the number of filters to divide.
        shares: the relative share of each rank, zero included [ranks].
        grain: the filters that stay together; halved until there are `GRAINS` for each
            rank.
    """
    grain = grain_of(length, len(shares), grain)
    sizes = [size * grain for size in apportion(length // grain, shares)]
    sizes[max(range(len(sizes)), key=lambda rank: shares[rank])] += length % grain
    return tuple(sizes)


class _Alternation:
    """The alternation of a model's layers, with the sharding of the channels that each gives."""

    def __init__(self, graph: Graph, group_size: int, shares: Shares, grain: int) -> None:
        self.graph, self.group_size, self.grain = graph, group_size, grain
        self.patterns = shares if isinstance(shares, Mapping) else {"*": shares or ()}
        self.whole = kept_whole(graph) | graph.shares_weights
        self.given: dict[str, tuple[int, ...] | None] = dict.fromkeys(graph.sources)

    def choice(self, layer: Layer) -> list[tuple[str, LayerPlan]]:
        """(its name, its choice) of a layer that has one."""
        read = [self.given[name] for name in layer.inputs]
        self.given[layer.name] = None
        if layer.name in self.whole:
            return []
        if layer.kind not in SPLITTABLE:
            self.given[layer.name] = self._kept(layer, read)
            return []
        return [(layer.name, self._split(layer, read[0]))]

    def _split(self, layer: Layer, read: tuple[int, ...] | None) -> LayerPlan:
        k = self.group_size
        if layer.kind == "attention":
            return LayerPlan("shard_heads", k, tuple(self._shares(layer)))
        if layer.groups > 1:
            groups = self._groups(layer, read)
            factor = layer.output_shape[0] // layer.groups
            self.given[layer.name] = tuple(size * factor for size in groups)
            return LayerPlan("shard_out", k, groups)
        if read is not None:
            return LayerPlan("shard_in", k, read)
        if layer.name in self.graph.outputs:
            return LayerPlan("duplicate", k)
        length = layer.output_shape[feature_dim(layer.output_shape, layer.kind) - 1]
        sizes = in_grains(length, self._shares(layer), self.grain)
        self.given[layer.name] = sizes
        return LayerPlan("shard_out", k, sizes)

    def _groups(self, layer: Layer, read: tuple[int, ...] | None) -> tuple[int, ...]:
        """The groups of a convolution on each rank: as its input is split, if that divides none."""
        each = layer.input_shape[0] // layer.groups
        if read is not None and not any(size % each for size in read):
            return tuple(size // each for size in read)
        return in_grains(layer.groups, self._shares(layer), self.grain)

    def _kept(self, layer: Layer, read: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
        """The sharding that a layer without a scheme passes on."""
        if layer.kind == "flatten" and read[0] is not None:
            factor = layer.output_shape[0] // layer.input_shape[0]
            return tuple(size * factor for size in read[0])
        if layer.kind in (*UNARY, "batch_norm"):
            return read[0]
        if layer.kind in ("add", "mul"):
            cuts = {cut for cut in read if cut is not None}
            return cuts.pop() if len(cuts) == 1 else None
        return None

    def _shares(self, layer: Layer) -> Sequence[float]:
        equal = (1,) * self.group_size
        fits = (s for name, s in self.patterns.items() if fnmatchcase(layer.name, name))
        return next(fits, equal) or equal
