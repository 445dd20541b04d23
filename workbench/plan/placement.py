"""Placements: which piece of a logical tensor each rank of a group holds."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Cut dimension `dim` into consecutive pieces, `sizes[r]` elements for rank r of a group.

    `torch.distributed.tensor.Shard(dim)` always cuts as `torch.chunk` does; here the sizes
    are stated, and equal pieces are the special case. A rank may own nothing (size 0).

    Raises:
        ValueError: a negative dimension, no sizes, or a negative size.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim counts from the front and must be >= 0, got {self.dim}")
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"sizes must be one or more non-negative integers, got {self.sizes}")

    @property
    def extent(self) -> int:
        """Length of the whole dimension, in elements."""
        return sum(self.sizes)

    def span(self, rank: int) -> tuple[int, int]:
        """(start, length) of rank's piece, as `Tensor.narrow` takes them."""
        return sum(self.sizes[:rank]), self.sizes[rank]

    def scaled(self, factor: int) -> "Shard":
        """The same cut where every element stands for `factor` consecutive ones (flatten)."""
        return Shard(self.dim, tuple(size * factor for size in self.sizes))

    def __str__(self) -> str:
        return f"S({self.dim}: {'/'.join(map(str, self.sizes))})"


@dataclass(frozen=True)
class Replicate:
    """Every rank of the group holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank of the group holds a summand of the tensor; their sum is its value."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Turns relative shares into whole sizes with sum `total` (largest remainders).

    A share of zero gets nothing. Of equal remainders the earlier one wins, so that
    `apportion(10, (1, 1, 1, 1))` is `(3, 3, 2, 2)`.

    Args:
        total: the number of elements to hand out, >= 0.
        shares: one non-negative number per receiver, not all zero.

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
    by_remainder = sorted(range(len(shares)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    receivers = [rank for rank in by_remainder if shares[rank] > 0]
    for rank in receivers[: total - sum(sizes)]:
        sizes[rank] += 1
    return tuple(sizes)
