"""A model's parameters as ranks hold them: their order, their pieces, and their buckets."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from workbench.plan.experiment import Experiment, LocalSGD, Synchronous
from workbench.plan.graph import Graph
from workbench.plan.placement import Replicate
from workbench.plan.plan import Plan
from workbench.plan.weights import WeightPlacement
from workbench.predict.program import BYTES
from workbench.predict.rows import Counts, tiled

# Linear layers with as large a weight write its gradient where the last step's was.
KEEPS_GRADIENT_BYTES = 2**22


def piece(placed: WeightPlacement, world_size: int) -> Counts:
    """Elements of a weight that each rank holds."""
    numel = int(np.prod(placed.shape, dtype=np.int64))
    if isinstance(placed.placement, Replicate):
        return np.full(world_size, numel, dtype=np.int64)
    others = numel // max(placed.shape[placed.placement.dim], 1)
    return tiled(placed.placement.sizes, world_size) * others


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

    def walk(self) -> Iterator[str]:
        yield from self.own.values()
        for child in self.children.values():
            yield from child.walk()


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
    return tuple(dict.fromkeys(root.walk()))


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, on one rank.

    Attributes:
        group_size: of the shard groups that their parameters lie over.
        names: of the parameters, in the order of the backward pass.
        numel: elements of all of them.
    """

    group_size: int
    names: tuple[str, ...]
    numel: int


def bucketed(
    plan: Plan, rank: int, bucket_bytes: int, element_bytes: int, names: Collection[str]
) -> tuple[Bucket, ...]:
    """The buckets of one rank: by replica group, closed once they hold `bucket_bytes`.

    Parameters without replicas are in none, nor are empty pieces.
    """
    closed: list[tuple[int, list[str], list[int]]] = []
    opened: dict[int, tuple[list[str], list[int]]] = {}
    for name in reversed(trainable_names(plan.graph)):
        placed = plan.flow.weights[name]
        numel = placed.piece_numel(rank)
        if name not in names or numel == 0 or placed.group_size == plan.world_size:
            continue
        if placed.group_size not in opened:
            opened[placed.group_size] = ([], [])
            closed.append((placed.group_size, *opened[placed.group_size]))
        members, sizes = opened[placed.group_size]
        members.append(name)
        sizes.append(numel)
        if sum(sizes) * element_bytes >= bucket_bytes:
            del opened[placed.group_size]
    return tuple(Bucket(k, tuple(members), sum(sizes)) for k, members, sizes in closed)


def buckets_of(experiment: Experiment, rank: int) -> tuple[Bucket, ...]:
    """Those in which one rank's gradients travel, in every step or after every round."""
    plan, sync = experiment.plan, experiment.sync
    every = set(trainable_names(plan.graph))
    match sync:
        case LocalSGD():
            return ()
        case Synchronous(per_round=True):
            tail = tail_names(plan)
            parts = (every - tail, tail)
        case _:
            parts = (every,)
    size = BYTES[experiment.precision]
    return tuple(
        bucket for part in parts for bucket in bucketed(plan, rank, sync.bucket_bytes, size, part)
    )


def tail_names(plan: Plan) -> set[str]:
    """Parameters behind the gather."""
    inside = frozenset() if plan.tail is None else plan.tail.layers
    layers = (layer for layer in plan.graph.layers if layer.name in inside)
    return {weight.name for layer in layers for weight in layer.weights if weight.trainable}
