"""Placements: which piece of a logical tensor each rank of a group holds.

The division of a batch's rows, and of tensors' elements, over ranks of unequal speed.

A rank's loss is the sum over its own rows divided by the rows of the whole batch, so that the sum
of all ranks' gradients is the gradient of the mean over the batch whatever rows each has: ranks are
weighted by the data that they process.

Source: Moreno-Alvarez et al. 2020 (doi:10.1007/s11227-020-03200-6), and 2022
(doi:10.1007/s11227-022-04399-2) for the weights.

Shard and replica groups of ranks, for any group size that divides the world; and how they meet.

With world size N and group size k, rank r is in shard group r // k at position r % k:

    N = 4, k = 2     position 0   position 1
    shard group 0      rank 0       rank 1       the ranks of a row hold the pieces of one copy
    shard group 1      rank 2       rank 3
                     replica      replica        the ranks of a column hold the same piece
                     group 0      group 1

k = 1 is data parallelism (one replica group, the world); k = N is one shard group.

Source: SplitBrain's group model parallelism (arXiv:2112.15317), stated in splitbrain form as
MP_g = {r : r // k = g} and PEER_s = {r : r % k = s}.

Layouts of activations over the world, and the conversions between two layers.

A layout is a placement over every shard group of one size. Four forms occur:

    ROWS           group size 1: every rank holds its own rows of the batch
    R over k       every rank of a group holds all rows of the group
    S(d) over k    the group's rows, sharded along dimension d
    P over k       the group's rows, as partial sums

The gradient of an activation has the activation's layout (of `P`: `R`), with one exception: where
replicated input meets work that differs by rank, its gradient arrives as partial sums. Such an edge
says `gradient="partial"`, and its crossing sums in the backward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from workbench.plan.io.errors import PlanError


@dataclass(frozen=True)
class Shard:
    """Shards dimension `dim` into consecutive pieces, `sizes[r]` elements for rank r of a group.

    `torch.distributed.tensor.Shard(dim)` always divides as `torch.chunk` does; here the sizes are
    stated, and equal pieces are the special case. A rank may own nothing (size 0).

    If the dimension consists of several equal blocks, each block is sharded alike, and a rank's
    piece is its part of every block: the heads of a fused query, key and value.

    Attributes:
        dim: the sharded dimension, counted from the front.
        sizes: the size of each rank's part of one block [ranks].
        blocks: the number of blocks.

    Raises:
        ValueError: a negative dimension, no sizes, a negative size, or no blocks.
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim counts from the front and must be >= 0, got {self.dim}")
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"sizes must be one or more non-negative integers, got {self.sizes}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be >= 1, got {self.blocks}")

    @property
    def extent(self) -> int:
        """The length of the whole dimension, in elements."""
        return self.blocks * sum(self.sizes)

    def length(self, rank: int) -> int:
        """The length of a rank's piece, in elements."""
        return self.blocks * self.sizes[rank]

    def span(self, rank: int) -> tuple[int, int]:
        """(start, length) of a rank's part of the first block, as for `Tensor.narrow`."""
        return sum(self.sizes[:rank]), self.sizes[rank]

    def spans(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, length) of a rank's part of every block; in this order they are its piece."""
        (start, length), block = self.span(rank), sum(self.sizes)
        return tuple((start + index * block, length) for index in range(self.blocks))

    @property
    def in_one_block(self) -> "Shard":
        """The sharding of the same lengths that has one block: its pieces lie end to end."""
        return Shard(self.dim, tuple(self.blocks * size for size in self.sizes))

    def scaled(self, factor: int) -> "Shard":
        """The sharding in which every element is `factor` consecutive ones (flatten)."""
        return Shard(self.dim, tuple(size * factor for size in self.sizes), self.blocks)

    def __str__(self) -> str:
        blocks = f" of {self.blocks} blocks" if self.blocks > 1 else ""
        return f"S({self.dim}: {'/'.join(map(str, self.sizes))}{blocks})"


@dataclass(frozen=True)
class Replicate:
    """Every rank of the group holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank of the group holds a partial sum of the tensor."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Turns relative shares into whole sizes with sum `total` (largest remainders).

    A share of zero gets nothing. Of equal remainders the earlier one wins, so that
    `apportion(10, (1, 1, 1, 1))` is `(3, 3, 2, 2)`.

    Args:
        total: the number of elements to divide, >= 0.
        shares: the relative share of each receiver, not negative and not all zero.

    Raises:
        ValueError: a negative total, no shares, a negative or non-finite share, or all zero.

    Source: Hamilton's method of apportionment.
    """
    if total < 0:
        raise ValueError(f"cannot hand out {total} elements")
    weight = sum(shares)
    if not shares or min(shares) < 0 or not 0 < weight < float("inf"):
        raise ValueError(f"shares must be non-negative and not all zero, got {tuple(shares)}")
    exact = [total * share / weight for share in shares]
    sizes = [int(quota) for quota in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: sizes[rank] - exact[rank])
    receivers = [rank for rank in by_remainder if shares[rank] > 0]
    for rank in receivers[: total - sum(sizes)]:
        sizes[rank] += 1
    return tuple(sizes)


# Elements; a multiple of every vector's length: kernels may round the rest of a tensor differently.
BLOCK = 64

_MOST_SHARE = 2**63  # shares are relative; products of one and rows, and sums, are then finite


def divide(lengths: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Divides the consecutive elements of concatenated tensors over ranks.

    Every rank gets nearly its share of all, and begins a multiple of BLOCK after the beginning of a
    tensor; so it has at most BLOCK elements more or less than that. A share of zero gets nothing.

    Returns:
        How many elements each rank gets of each tensor.
    """
    ends, shared = list(accumulate(lengths)), list(accumulate(shares))
    total = ends[-1]
    borders = [0]
    for before in shared[:-1]:
        ideal = int(total * before / shared[-1])
        end = next((end for end in ends if ideal < end), total)
        begin = end - lengths[ends.index(end)]
        below = begin + (ideal - begin) // BLOCK * BLOCK
        above = min(below + BLOCK, end)
        borders.append(below if ideal - below <= above - ideal else above)
    borders.append(total)
    return [
        tuple(max(0, min(b, end) - max(a, end - n)) for a, b in pairwise(borders))
        for n, end in zip(lengths, ends, strict=True)
    ]


def is_share(value: object) -> bool:
    """Whether it is a number that can be the share of a rank: 0 or more, and finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _MOST_SHARE


def checked_shares(shares: Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """The relative shares of ranks; None where all are equal."""
    if shares is None:
        return None
    given = tuple(shares) if isinstance(shares, Sequence) else (shares,)
    if not all(map(is_share, given)) or len(given) != ranks or not any(given):
        raise PlanError(
            f"shares must be {ranks} numbers >= 0, one for each rank and not all zero, "
            f"got {shares!r}"
        )
    return None if len(set(given)) == 1 else given


def shared_out(count: int, shares: tuple[float, ...] | None, ranks: int) -> tuple[int, ...]:
    """The rows of each rank, of `count` rows [ranks]; of equal shares the first get one more."""
    if shares is not None:
        return apportion(count, shares)
    size, more = divmod(count, ranks)  # as `apportion`, also for very many ranks
    return (size + 1,) * more + (size,) * (ranks - more)


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Every group size that divides `world_size`, ascending."""
    return tuple(k for k in range(1, world_size + 1) if world_size % k == 0)


def require_group(group_size: int | None, world_size: int) -> int:
    """The size of shard groups; None: all ranks."""
    k = world_size if group_size is None else group_size
    if k not in group_sizes(world_size):
        valid = ", ".join(map(str, group_sizes(world_size)))
        raise PlanError(
            f"group_size {k!r} does not divide world_size {world_size}; valid are {valid}"
        )
    return k


def shard_group(rank: int, group_size: int) -> tuple[int, ...]:
    """The ranks that together hold one whole copy, `rank` among them, in order."""
    first = rank - rank % group_size
    return tuple(range(first, first + group_size))


def replica_group(rank: int, group_size: int, world_size: int) -> tuple[int, ...]:
    """The ranks that hold the same piece as `rank`, in order."""
    return tuple(range(rank % group_size, world_size, group_size))


def shard_groups(group_size: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """All shard groups, in the order of their first ranks."""
    return tuple(shard_group(rank, group_size) for rank in range(0, world_size, group_size))


def replica_groups(group_size: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """All replica groups, in the order of their first ranks."""
    return tuple(replica_group(rank, group_size, world_size) for rank in range(group_size))


@dataclass(frozen=True)
class RankConfig:
    """The settings of one rank: its number, its device, and how it connects to the others.

    Args:
        rank: the rank's number in the world.
        world_size: the number of ranks.
        address: the host of the `TCPStore` through which the ranks connect; it belongs to none of
            them.
        port: the port of the `TCPStore`.
        prefix: the prefix that separates this world's keys from others in the same store; new for
            every world.
        timeout_s: the seconds that a rank waits for the others, to connect and in every collective.
        device: the device that this rank computes on: "cpu", "cuda:0", ...
        threads: the number of threads that torch may use on this rank.
        shared_memory: whether groups whose ranks are on one host communicate through its memory,
            and not through gloo.
        host: the name of this rank's host, if several are emulated on one: ranks with different
            names share no memory. Real hosts need no names.
        secret: the text with which the notes by which these ranks find each other are under a MAC;
            nobody else knows it.
    """

    rank: int
    world_size: int
    address: str
    port: int
    prefix: str
    timeout_s: float = 30.0
    device: str = "cpu"
    threads: int = 1
    shared_memory: bool = True
    host: str = ""
    secret: str = field(default="", repr=False)


Gradient = Literal["same", "partial"]


@dataclass(frozen=True)
class Layout:
    """A placement over the shard groups of `group_size` ranks."""

    group_size: int
    placement: Placement

    def __str__(self) -> str:
        return "own rows" if self == ROWS else f"{self.placement} over {self.group_size}"


ROWS = Layout(1, Replicate())


def over(group_size: int, placement: Placement) -> Layout:
    """The layout; a group of one rank always means `ROWS`."""
    return ROWS if group_size == 1 else Layout(group_size, placement)


@dataclass(frozen=True)
class Conversion:
    """One change of layout on an edge of the graph.

    Attributes:
        gradient: the form in which the gradient arrives from the readers: "same" as the target's
            layout, or "partial" sums.
        shape: the shape of the tensor for one sample.
        blocks: the equal blocks of the cut features before and after, which are cut alike
            (`Shard.blocks`); the layouts themselves say the lengths of the pieces.
    """

    source: Layout
    target: Layout
    gradient: Gradient
    shape: tuple[int, ...]
    rows: int = 1
    blocks: tuple[int, int] = (1, 1)

    @property
    def group_size(self) -> int:
        """The size of the groups it communicates in: one layout is ROWS, or both agree."""
        return max(self.source.group_size, self.target.group_size)

    @property
    def name(self) -> str:
        """The operation of the forward pass: the collective, and the dimension that it moves."""
        source, target = self.source, self.target
        cut = target.placement if isinstance(target.placement, Shard) else source.placement
        tokens = len(self.shape) == 2 and isinstance(cut, Shard) and cut.dim == 1
        pieces = "tokens" if tokens else "features"
        match source.placement, target.placement:
            case _ if source == target:
                return "copy_to"
            case Partial(), Replicate() if target != ROWS:
                return "all_reduce"
            case Partial(), _:
                return "reduce_scatter_rows" if target == ROWS else f"reduce_scatter_{pieces}"
            case Replicate(), Replicate():
                return "all_gather_rows" if source == ROWS else "slice_rows"
            case Shard(), Replicate() if target != ROWS:
                return f"all_gather_{pieces}"
            case Replicate(), Shard() if source != ROWS:
                return f"slice_{pieces}"
            case _:
                return "all_to_all"


def route(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """The layouts on the way: one step inside groups of one size, else through ROWS."""
    if source == target:
        return ()
    one_block = not any(
        isinstance(layout.placement, Shard) and layout.placement.blocks > 1
        for layout in (source, target)
    )
    if ROWS in (source, target) or (source.group_size == target.group_size and one_block):
        return (target,)
    return (ROWS, target)


# Elements received forward, in multiples of (k - 1) times a rank's own rows of the tensor.
_VOLUME = {
    "copy_to": 0.0,
    "slice_rows": 0.0,
    "slice_features": 0.0,
    "slice_tokens": 0.0,
    "all_gather_rows": 1.0,
    "all_gather_features": 1.0,
    "all_gather_tokens": 1.0,
    "reduce_scatter_rows": 1.0,
    "reduce_scatter_features": 1.0,
    "reduce_scatter_tokens": 1.0,
    "all_reduce": 2.0,
}


def volume(source: Layout, target: Layout, shape: tuple[int, ...]) -> float:
    """Elements that a rank receives for each of its own rows, forward; for comparing choices.

    Source: the cost model of SplitBrain (arXiv:2112.15317) as derived for equal pieces.
    """
    total = 0.0
    for target_ in route(source, target):
        step = Conversion(source, target_, "same", shape)
        k = step.group_size
        share = _VOLUME.get(step.name, 1 / k)  # in an all-to-all a rank keeps 1/k of its data
        total += share * (k - 1) * math.prod(shape)
        source = target_
    return total
