"""A running model cut anew: from the pieces of one plan to those of another, between engines.

At a step's end every rank has its pieces of weights, buffers and optimizer state. Under another
plan some of their elements belong elsewhere; only these travel (`plan/recut.py`), straight from
place to place (`comm/parts.py`), so that nothing more than the pieces is held, while each rank
copies what it keeps. Its part of the model is then built as from a checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.groups.group import Group
from workbench.comm.parts import MOST_BYTES, Kept, Part, exchange_parts
from workbench.plan.placement import Shard
from workbench.plan.recut import Move, Recut, Region, held, replica_after
from workbench.plan.weights import WeightPlacement

RECUT = "recut"


@dataclass(frozen=True)
class Entry:
    """A tensor that lies as a weight does: the weight, or a state of it.

    Attributes:
        key: its name.
        weight: the weight's name in the state_dict.
        dtype: of its elements.
        replica: of the sets of ranks that hold the whole weight, the only one that has it; None:
            all have.
    """

    key: str
    weight: str
    dtype: torch.dtype
    replica: int | None = None


class Pieces:
    """This rank's pieces under a plan, by key: where a model cut by that plan reads its weights."""

    def __init__(
        self, placements: Mapping[str, WeightPlacement], tensors: dict[str, Tensor]
    ) -> None:
        self._placements, self._tensors = placements, tensors
        self.names = tuple(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._placements[name].shape

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """This rank's piece, handed over; it can be read once."""
        return self._tensors.pop(name)


def move_pieces(
    recut: Recut, entries: Sequence[Entry], own: Mapping[str, Tensor], everyone: Group
) -> dict[str, Tensor]:
    """This rank's pieces under the new plan; every rank calls it.

    Args:
        recut: from which plan to which.
        entries: what there is, the same on all ranks.
        own: this rank's pieces under the old plan, by key; of an entry of which it holds nothing,
            none is needed.
        everyone: all ranks.

    Raises:
        CommError: a rank is gone. `own` is as it was.
    """
    rank, found = everyone.rank, dict[str, Tensor]()
    kept = dict[torch.dtype, list[Kept]]()
    for entry in entries:
        before, after = (p.flow.weights[entry.weight] for p in (recut.before, recut.after))
        later = replica_after(after, everyone.size, entry.replica)
        if later is None and _lies_alike(before, after):
            found[entry.key] = own[entry.key] if entry.key in own else _empty(entry, after, rank)
        elif later is None or rank // after.group_size == later:
            found[entry.key] = piece = _empty(entry, after, rank)
            kept.setdefault(entry.dtype, []).extend(_kept(entry, before, after, rank, own, piece))
    for dtype in sorted({entry.dtype for entry in entries}, key=str):
        alike = [entry for entry in entries if entry.dtype == dtype]
        parts = _parts(alike, recut, own, found, rank)
        exchange_parts(parts, dtype, everyone, kept.get(dtype, ()), layer=RECUT)
    return found


def _lies_alike(before: WeightPlacement, after: WeightPlacement) -> bool:
    return (before.placement, before.group_size) == (after.placement, after.group_size)


def _kept(
    entry: Entry,
    before: WeightPlacement,
    after: WeightPlacement,
    rank: int,
    own: Mapping[str, Tensor],
    piece: Tensor,
) -> Iterator[Kept]:
    """What this rank held of its new piece already."""
    for mine in held(before, rank, entry.replica):
        for wanted in held(after, rank):
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, wanted, strict=True)
            )
            if all(start < stop for start, stop in common):
                source = own[entry.key][_place(before, rank, common)]
                yield Kept(source, piece[_place(after, rank, common)])


def _empty(entry: Entry, placed: WeightPlacement, rank: int) -> Tensor:
    return torch.empty(placed.piece_shape(rank), dtype=entry.dtype)


def _parts(
    entries: Sequence[Entry],
    recut: Recut,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    rank: int,
) -> list[Part]:
    """What travels, with the places from and to which it does."""
    of_weight: dict[str, list[Move]] = {}
    for move in recut.moves:
        of_weight.setdefault(move.name, []).append(move)
    parts = []
    for entry in entries:
        before, after = (p.flow.weights[entry.weight] for p in (recut.before, recut.after))
        moves: Sequence[Move] = of_weight.get(entry.weight, ())
        if entry.replica is not None:
            moves = recut.residual_moves(entry.weight, entry.replica)
        for whole in moves:
            for move in whole.parts(MOST_BYTES // entry.dtype.itemsize):
                tensor = None
                if move.source == rank:
                    tensor = own[entry.key][_place(before, rank, move.region)]
                elif move.target == rank:
                    tensor = found[entry.key][_place(after, rank, move.region)]
                parts.append(Part(move.source, move.target, move.numel, tensor))
    return parts


def _place(placed: WeightPlacement, rank: int, region: Region) -> tuple[slice, ...]:
    """Where a region of the whole tensor is in a rank's piece, which holds all of it."""
    place = [slice(start, stop) for start, stop in region]
    if isinstance(placed.placement, Shard):
        dim, before = placed.placement.dim, 0
        start, stop = region[dim]
        for first, length in placed.placement.spans(rank % placed.group_size):
            if first <= start and stop <= first + length:
                place[dim] = slice(before + start - first, before + stop - first)
                break
            before += length
    return tuple(place)
