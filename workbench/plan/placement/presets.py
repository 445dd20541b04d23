"""Choices for whole models: the rule of `Plan.hybrid`, and its reason for each layer.

Parameters against FLOPs. Sharding a layer over k ranks saves (1 - 1/k) of its parameters on every
rank, and of their gradients' traffic; it costs the traffic of its activations, which grow as its
FLOPs do. Convolutions, which apply each weight at every position, are replicated. Linear layers,
embeddings and attention are the candidates, and a candidate is sharded if it

    is large    has at least 1/100 of the parameters of the model's largest candidate
    is heavy    share of the model's parameters >= 1/2 of its share of the model's FLOPs

Classifiers behind convolutions are heavy by far. So are a transformer's blocks, by a factor of
about one: every weight meets every token. The first stages of Swin and ConvNeXt are not: their
images are large, and their weights few.

A linear layer whose input comes cut from such layers is sharded by its input: the second of an MLP,
also behind a gate, and the output of attention that is written out, which so is cut by heads.

An embedding is cut by features, whose pieces travel once; one whose table also gives the scores of
tokens is cut by the vocabulary, with those, so that whole scores are nowhere.

A layer whose weights evaluation reads otherwise than training stays whole (`placement/tied.py`).

Source: SplitBrain (arXiv:2112.15317) for the division of a network; the thresholds are ours.

Choices for whole models: the rule of `Plan.filters`, heterogeneous model parallelism.

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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Literal

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.graph.saved import Propagation
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import apportion, checked_shares
from workbench.plan.placement.rules import SPLITTABLE, UNARY, feature_dim
from workbench.plan.placement.tied import kept_whole, sharing, together

Reason = Literal["cut", "convolution", "small", "light", "shared", "evaluated"]

CANDIDATES = ("linear", "embedding", "attention")

_FOLLOW = ("elementwise", "dropout", "add", "mul")
LARGE = 1 / 100

HEAVY = 1 / 2


@dataclass(frozen=True)
class LayerDecision:
    """The rule's decision on one layer that could be sharded.

    Attributes:
        reason: "cut" if the layer is sharded, or why it stays whole: a "convolution"; "small" or
            "light" (not heavy); its weights are "shared" with another layer, or are "evaluated"
            otherwise than they are trained.
    """

    layer: Layer
    parameters: float
    flops: float
    reason: Reason


def hybrid(graph: Graph, group_size: int) -> dict[str, LayerPlan]:
    """The layers that the rule shards; linear layers in column-row pairs, attention by heads."""
    if group_size == 1:
        return {}
    choices: dict[str, LayerPlan] = {}
    for layer in (
        decision.layer for decision in layer_decisions(graph) if decision.reason == "cut"
    ):
        if layer.name in graph.shares_weights:
            choices |= _with_tied(graph, layer, group_size)
            continue
        if layer.kind == "attention":
            scheme = "shard_heads"
        elif _comes_cut(graph, layer.inputs[0], choices):
            scheme = "shard_in"
        else:
            scheme = "shard_out"
        choices[layer.name] = LayerPlan(scheme, group_size)
    return choices


def layer_decisions(graph: Graph) -> tuple[LayerDecision, ...]:
    """The rule's decision on every layer with parameters that could be sharded, in order."""
    held = [layer for layer in graph.layers if layer.parameters]
    candidates = [layer for layer in held if layer.kind in CANDIDATES]
    largest = max((layer.parameters for layer in candidates), default=1)
    found = []
    whole = kept_whole(graph)
    tables = {layer.name for layer in held if _is_tied_table(graph, layer)}
    for layer in held:
        if layer.kind not in (*CANDIDATES, "conv2d") or layer.shared in tables:
            continue
        parameters = layer.parameters / graph.parameters
        users = sharing(graph, layer.name) if layer.name in tables else (layer,)
        flops = sum(one.counted_flops for one in users) / max(graph.flops, 1)
        reason: Reason = "cut"
        if layer.kind == "conv2d":
            reason = "convolution"
        elif layer.name in whole:
            reason = "evaluated"
        elif layer.name in graph.shares_weights and layer.name not in tables:
            reason = "shared"
        elif layer.parameters < LARGE * largest:
            reason = "small"
        elif parameters < HEAVY * flops:
            reason = "light"
        found.append(LayerDecision(layer, parameters, flops, reason))
    return tuple(found)


def _is_tied_table(graph: Graph, layer: Layer) -> bool:
    """Whether it is an embedding whose table can be cut by the vocabulary wherever it is used."""
    if layer.kind != "embedding" or layer.name not in graph.shares_weights:
        return False
    try:
        return bool(_with_tied(graph, layer, 2))
    except PlanError:
        return False


def _with_tied(graph: Graph, table: Layer, group_size: int) -> dict[str, LayerPlan]:
    choice = LayerPlan("shard_in", group_size)
    return together(graph, table.name, choice, {}, group_size)


def followed(graph: Graph, choices: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
    """The rule's choices, if these choices were (mostly) made by it; else none."""
    cut = {name: choice for name, choice in choices.items() if choice.scheme != "replicate"}
    if not cut:
        return {}
    sizes = [choice.group_size for choice in cut.values()]
    ruled = hybrid(graph, max(set(sizes), key=lambda k: (sizes.count(k), k)))
    agreed = sum(name in cut and alike(cut[name], choice) for name, choice in ruled.items())
    return ruled if 2 * agreed >= len(cut.keys() | ruled.keys()) else {}


def alike(one: LayerPlan, other: LayerPlan) -> bool:
    """Whether two choices shard a layer in the same way."""
    first, second = ((c.scheme, c.group_size, c.shares) for c in (one, other))
    return first == second


def _comes_cut(graph: Graph, name: str, choices: Mapping[str, LayerPlan]) -> bool:
    """Whether all that a value is made of, and that may be cut, comes so from cut layers."""
    if name in graph.sources:
        return False
    if name in choices:
        return choices[name].scheme == "shard_out"
    layer = graph[name]
    ways = _ways(layer)
    if ways:
        read = {i for way in ways for i, cut in enumerate(way.inputs) if cut}
        # What nothing cuts is converted to its pieces, as one number for each head.
        able = [layer.inputs[index] for index in read if _may_come_cut(graph, layer.inputs[index])]
        return bool(able) and all(_comes_cut(graph, one, choices) for one in able)
    readers = [one for one in graph.consumers[name] if not graph[one].of_type]
    if layer.kind not in _FOLLOW or len(readers) > 1:
        return False
    return all(_comes_cut(graph, above, choices) for above in layer.inputs)


def _may_come_cut(graph: Graph, name: str) -> bool:
    if name in graph.sources:
        return False
    layer = graph[name]
    return layer.kind in (*SPLITTABLE, *_FOLLOW) or bool(_ways(layer))


def _ways(layer: Layer) -> list[Propagation]:
    return [way for way in layer.propagations if not way.of_tokens]


RULE = (
    "Rule: convolutions stay whole; a linear, embedding or attention layer is cut that has >= "
    f"{LARGE:.0%} of the parameters of the largest such layer, and whose share of the model's "
    f"parameters is >= {HEAVY:g} times its share of the FLOPs."
)

_WHY = {
    "cut": "cut",
    "convolution": "whole, convolutions",
    "small": f"whole, < {LARGE:.0%} of the largest",
    "light": f"whole, parameters < {HEAVY:g} times FLOPs",
    "shared": "whole, weights shared with another layer",
    "evaluated": "whole, weights that evaluation reads otherwise",
}

_NAMES = 3


def explained(graph: Graph, choices: Mapping[str, LayerPlan]) -> list[str]:
    """The rule, its decisions on the model's layers, and where a plan's choices differ.

    Empty for choices that do not follow the rule in at least half of the layers.
    """
    ruled = followed(graph, choices)
    if not ruled:
        return []
    found = sorted(layer_decisions(graph), key=_order)
    lines = [RULE]
    for _, group in groupby(found, key=_order):
        lines.append(_line(list(group)))
    for name in dict.fromkeys((*ruled, *choices)):
        rule, chosen = (of.get(name, LayerPlan()) for of in (ruled, choices))
        if not alike(rule, chosen):
            lines.append(f"  otherwise: {name} is {_shown(chosen)}; by the rule {_shown(rule)}")
    return lines


def _order(decision: LayerDecision) -> tuple[int, str]:
    return list(_WHY).index(decision.reason), decision.layer.kind


def _line(group: list[LayerDecision]) -> str:
    """One line for all layers of a kind with the same decision."""
    first, count = group[0], len(group)
    names = ", ".join(decision.layer.name for decision in group[:_NAMES])
    more = f", ... {count - _NAMES} more" if count > _NAMES else ""
    parameters = _percent(sum(decision.parameters for decision in group))
    flops = _percent(sum(decision.flops for decision in group))
    return (
        f"  {_WHY[first.reason]}: {count} {first.layer.kind}, {parameters} of the parameters, "
        f"{flops} of the FLOPs ({names}{more})"
    )


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def _shown(choice: LayerPlan) -> str:
    if choice.scheme == "replicate":
        return choice.name
    shares = f" by {'/'.join(map('{:g}'.format, choice.shares))}" if choice.shares else ""
    return f"{choice.name}/{choice.group_size}{shares}"


GRAINS = 4

Shares = Sequence[float] | Mapping[str, Sequence[float]] | None


def filters(graph: Graph, group_size: int, shares: Shares, grain: int) -> dict[str, LayerPlan]:
    """The choice of each layer.

    Args:
        shares: the relative filters of each rank of a group; or such for each pattern of layer
            names, of which the first match counts; None, or no match: equal.
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
    """The shares of rows that go with these shares of filters; None: equal."""
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
