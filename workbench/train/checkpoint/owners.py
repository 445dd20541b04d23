"""Which rank writes which piece of a checkpoint, so that each is written once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.plan.placement import Shard
from workbench.plan.weights import WeightPlacement


@dataclass(frozen=True)
class Holding:
    """One piece of a logical tensor, and the ranks that hold it.

    Attributes:
        name: of the logical tensor.
        shard: how it is cut; None: the piece is the whole.
        index: which piece of `shard`.
        elements: its size.
        holders: in order.
    """

    name: str
    shard: Shard | None
    index: int
    elements: int
    holders: tuple[int, ...]


def holdings(name: str, placed: WeightPlacement, world_size: int) -> list[Holding]:
    """The pieces of a logical tensor that lies like this, but for empty ones."""
    if not isinstance(placed.placement, Shard):
        return [Holding(name, None, 0, math.prod(placed.shape), tuple(range(world_size)))]
    k = placed.group_size
    return [
        Holding(name, placed.placement, p, placed.piece_numel(p), tuple(range(p, world_size, k)))
        for p, size in enumerate(placed.placement.sizes)
        if size > 0
    ]


def assign(pieces: Iterable[Holding], world_size: int) -> tuple[tuple[Holding, ...], ...]:
    """For each rank, the pieces that it writes: of what it holds, and about as much as others.

    The largest piece goes first (of equal ones, that with the fewest holders), always to the
    holder that writes least so far. Every rank computes the same answer from the plan, without
    communication.

    Source: the longest-processing-time rule (Graham 1969).
    """
    written = [0] * world_size
    chosen: list[list[Holding]] = [[] for _ in range(world_size)]
    for piece in sorted(pieces, key=_urgency):
        rank = min(piece.holders, key=lambda rank: (written[rank], rank))
        written[rank] += piece.elements
        chosen[rank].append(piece)
    return tuple(map(tuple, chosen))


def _urgency(piece: Holding) -> tuple[int, int, str, int]:
    return -piece.elements, len(piece.holders), piece.name, piece.index
