"""Placements: which piece of a logical tensor each rank of a group holds."""

from collections.abc import Sequence
from dataclasses import dataclass


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
