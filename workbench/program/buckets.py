"""A model's parameters as ranks hold them, and the buckets in which they travel: all ranks at once.

Ranks at one place of their shard groups, whatever the groups' size, hold the same pieces, and so
have the same buckets: these are made once for each place. Where the optimizer's work is cut over
replicas, `moved_by` says which part of each bucket a rank updates (`plan/placement/placement.py`
divides).
"""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from workbench.plan.experiment.experiment import Experiment, Synchronous
from workbench.plan.experiment.optimizers import AnyOptimizer
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Replicate, divide
from workbench.plan.plans.plan import Plan
from workbench.program.rows import Counts, tiled

BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}  # of an element of a weight, or of an image
# Linear layers with as large a weight write its gradient where the last step's was.
KEEPS_GRADIENT_BYTES = 2**22


@dataclass(frozen=True)
class Pieces:
    """What ranks hold of an experiment's weights."""

    names: tuple[str, ...]
    sizes: dict[str, Counts]
    owners: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> "Pieces":
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


def copies(optimizer: AnyOptimizer) -> int:
    """How many tensors like a parameter an optimizer keeps for it, outside of groups."""
    return len(optimizer.remembers.elements)


WHOLE = 2**62
"""Bytes that no bucket holds."""


@dataclass(frozen=True)
class Bucket:
    """What travels together, on one rank.

    Attributes:
        group_size: the size of the shard groups that the parameters lie over; it travels over as
            many replica groups.
        names: the names of the parameters, in the order of the backward pass.
    """

    group_size: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Buckets:
    """Those of all ranks."""

    of_place: tuple[tuple[Bucket, ...], ...]
    place: Counts

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Buckets)
            and self.of_place == other.of_place
            and np.array_equal(self.place, other.place)
        )

    def __hash__(self) -> int:
        return hash(self.of_place)

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters that some rank's hold."""
        return frozenset(n for own in self.of_place for bucket in own for n in bucket.names)

    def within(self, names: Collection[str]) -> "Buckets":
        """Only those that hold some of these parameters; they hold no others."""
        of_place = (tuple(b for b in own if b.names[0] in names) for own in self.of_place)
        return Buckets(tuple(of_place), self.place)

    def columns(self) -> "Iterator[Column]":
        """The n-th buckets of all ranks that travel over groups of one size: they travel at once.

        Those who have less than n take no part; nor does anyone in their replica group.
        """
        for k in sorted({bucket.group_size for own in self.of_place for bucket in own}):
            chosen = [[bucket for bucket in own if bucket.group_size == k] for own in self.of_place]
            for index in range(max(map(len, chosen))):
                row = tuple(own[index] if index < len(own) else None for own in chosen)
                yield Column(k, index, row, self.place)


@dataclass(frozen=True, eq=False)
class Column:
    """One bucket of each rank; see `Buckets.columns`."""

    group_size: int
    number: int
    of_place: tuple[Bucket | None, ...]
    place: Counts

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Column)
            and (self.group_size, self.number) == (other.group_size, other.number)
            and self.of_place == other.of_place
            and np.array_equal(self.place, other.place)
        )

    def __hash__(self) -> int:
        return hash(self.of_place)

    @property
    def bytes(self) -> Counts:
        sizes = [0 if bucket is None else bucket.bytes for bucket in self.of_place]
        return np.array(sizes, dtype=np.int64)[self.place]

    @property
    def names(self) -> set[str]:
        return {name for bucket in self.of_place if bucket is not None for name in bucket.names}

    @property
    def there(self) -> Counts:
        """1 for each rank that has one, else 0."""
        some = [bucket is not None for bucket in self.of_place]
        return np.array(some, dtype=np.int64)[self.place]


def late(experiment: Experiment) -> int:
    """How many steps' gradients are in flight beside the one that is computed."""
    found: int = experiment.sync.timing.late
    return found


def buckets_of(experiment: Experiment, pieces: Pieces) -> Buckets:
    """Those in which gradients travel, in every step or after every round.

    Gradients that are used late travel all at once, with them those that only one rank has.
    """
    if experiment.sync.timing.of_weights:
        return _made(experiment, pieces, [], 0)
    if late(experiment):
        return _made(experiment, pieces, [set(pieces.names)], WHOLE, alone=True)
    return handed_out(experiment, pieces)


def handed_out(experiment: Experiment, pieces: Pieces) -> Buckets:
    """Those in which weights come back that other ranks have moved."""
    sync, every = experiment.sync, set(pieces.names)
    apart = [every]
    if isinstance(sync, Synchronous) and sync.per_round:
        tail = tail_names(experiment.plan)
        apart = [every - tail, tail]
    return _made(experiment, pieces, apart, sync.bucket_bytes)


def _made(
    experiment: Experiment,
    pieces: Pieces,
    apart: list[set[str]],
    limit: int,
    *,
    alone: bool = False,
) -> Buckets:
    ranks, place = _places(experiment, pieces)
    of_place = tuple(
        tuple(
            bucket
            for names in apart
            for bucket in _bucketed(experiment, pieces, rank, names, limit, alone)
        )
        for rank in ranks
    )
    return Buckets(of_place, place)


def averaged(experiment: Experiment, pieces: Pieces) -> Buckets:
    """Those in which parameters are averaged, and momentum where it is averaged too."""
    ranks, place = _places(experiment, pieces)
    of_place = tuple(tuple(_averaged(experiment, pieces, rank)) for rank in ranks)
    return Buckets(of_place, place)


def _places(experiment: Experiment, pieces: Pieces) -> tuple[list[int], Counts]:
    """The first rank of each place, and the place of each rank; places of equal pieces are one."""
    plan = experiment.plan
    sizes = sorted({placed.group_size for placed in plan.flow.weights.values()})
    every = np.arange(plan.world_size)
    keys = np.stack([every % k for k in sizes or [1]])
    _, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    each = {id(size): size for name in pieces.names for size in (pieces.sizes[name],)}
    held = np.array([size[first] for size in each.values()]).reshape(-1, len(first))
    _, chosen, alike = np.unique(held, axis=1, return_index=True, return_inverse=True)
    return first[chosen].tolist(), alike.reshape(-1)[place.reshape(-1)]


def _bucketed(
    experiment: Experiment,
    pieces: Pieces,
    rank: int,
    names: Collection[str],
    limit: int,
    alone: bool,
) -> list[Bucket]:
    """By replica group, closed once they hold `limit` bytes; no empty pieces.

    Parameters without replicas are in none, but for `alone`.
    """
    placed, world = experiment.plan.flow.weights, experiment.plan.world_size
    closed: list[tuple[int, list[str], list[int]]] = []
    opened: dict[int, tuple[list[str], list[int]]] = {}
    held: dict[int, int] = {}
    for name in reversed(pieces.names):
        k = placed[name].group_size
        if name not in names or (k == world and not alone):
            continue
        size = int(pieces.sizes[name][rank])
        if size == 0:
            continue
        if k not in opened:
            opened[k], held[k] = ([], []), 0
            closed.append((k, *opened[k]))
        members, sizes = opened[k]
        members.append(name)
        sizes.append(size)
        held[k] += size
        if held[k] >= limit:
            del opened[k]
    return [Bucket(k, tuple(members), tuple(sizes)) for k, members, sizes in closed]


def _averaged(experiment: Experiment, pieces: Pieces, rank: int) -> Iterator[Bucket]:
    placed, limit = experiment.plan.flow.weights, experiment.sync.bucket_bytes
    with_state = experiment.sync.timing.momentum == "average"
    times = {n: copies(one) * with_state for n, one in experiment.optimizers.items()}
    for k in sorted({placed[name].group_size for name in pieces.names}):
        if k == experiment.plan.world_size:
            continue
        own = [name for name in pieces.names if placed[name].group_size == k]
        names: list[str] = []
        for name in own + [each for each in own for _ in range(times[each])]:
            if pieces.sizes[name][rank]:
                names.append(name)
            held = tuple(int(pieces.sizes[name][rank]) for name in names)
            if sum(held) >= limit:
                yield Bucket(k, tuple(names), held)
                names = []
        if names:
            yield Bucket(k, tuple(names), tuple(int(pieces.sizes[n][rank]) for n in names))


def moved_by(column: Column, element: int, shares: Sequence[float]) -> dict[str, Counts]:
    """Bytes that each rank moves of each parameter in its bucket."""
    world_size, k = len(column.place), column.group_size
    index = np.arange(world_size) // k
    found: dict[str, Counts] = {}
    known: dict[tuple[int, tuple[float, ...]], list[int]] = {}  # ranks of groups that divide alike
    for member in range(k):
        known.setdefault((int(column.place[member]), tuple(shares[member::k])), []).append(member)
    for (place, of), members in known.items():
        bucket = column.of_place[place]
        if bucket is None:
            continue
        ranks = np.flatnonzero(np.isin(np.arange(world_size) % k, members))
        parts = divide([size // element for size in bucket.sizes], of)
        for name, part in zip(bucket.names, parts, strict=True):
            moved = found.setdefault(name, np.zeros(world_size, dtype=np.int64))
            moved[ranks] = np.array(part, dtype=np.int64)[index[ranks]] * element
    return found


def updated(
    pieces: Pieces, buckets: Buckets | None, element: int, shares: Sequence[float]
) -> dict[str, Counts]:
    """Bytes of each parameter that each rank moves.

    Args:
        buckets: the buckets that parameters with replicas are cut in; None: each rank moves all it
            holds.
    """
    found = {name: pieces.sizes[name] for name in pieces.names}
    cut: dict[str, Counts] = {}
    for column in buckets.columns() if buckets is not None else ():
        for name, moved in moved_by(column, element, shares).items():
            cut[name] = cut[name] + moved if name in cut else moved
    return {**found, **cut}
