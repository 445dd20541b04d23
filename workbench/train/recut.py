"""A running model cut anew: from the pieces of one plan to those of another, between engines.

At a step's end every rank has its pieces of weights, buffers and optimizer state. Under another
plan some of their elements belong elsewhere; only these travel (`plan/recut.py`), straight from
rank to rank, in batches, so that little more than the pieces is held at any time. The rank's part
of the model is then built as from a checkpoint, from what it kept and what came.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_to_all_v import all_to_all_v
from workbench.comm.group import Group
from workbench.plan.placement import Shard
from workbench.plan.recut import Move, Recut, Region, held
from workbench.plan.weights import WeightPlacement

# Of all ranks together. Memory of this size is used again and again, batch after batch; more would
# come fresh from the system each time, which takes longer than copying.
BATCH_BYTES = 2**25
RECUT = "recut"


@dataclass(frozen=True)
class Entry:
    """A tensor that lies as a weight does: the weight, or a state of it.

    Attributes:
        key: its name.
        weight: the weight's name in the state_dict.
        dtype: of its elements.
    """

    key: str
    weight: str
    dtype: torch.dtype


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
    changed = {move.name for move in recut.moves}
    for entry in entries:
        before, after = (p.flow.weights[entry.weight] for p in (recut.before, recut.after))
        if (before.placement, before.group_size) == (after.placement, after.group_size):
            found[entry.key] = own[entry.key] if entry.key in own else _empty(entry, after, rank)
        else:
            found[entry.key] = _kept(entry, before, after, rank, own)
    for batch in _batches([entry for entry in entries if entry.weight in changed], recut):
        _exchange(batch, recut, own, found, everyone)
    return found


def _kept(
    entry: Entry,
    before: WeightPlacement,
    after: WeightPlacement,
    rank: int,
    own: Mapping[str, Tensor],
) -> Tensor:
    """The new piece, with what this rank held of it already."""
    piece = _empty(entry, after, rank)
    for mine in held(before, rank):
        for wanted in held(after, rank):
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, wanted, strict=True)
            )
            if all(start < stop for start, stop in common):
                source = own[entry.key][_place(before, rank, common)]
                piece[_place(after, rank, common)].copy_(source)
    return piece


def _empty(entry: Entry, placed: WeightPlacement, rank: int) -> Tensor:
    return torch.empty(placed.piece_shape(rank), dtype=entry.dtype)


Part = tuple[Entry, Move]


def _batches(entries: Sequence[Entry], recut: Recut) -> Iterator[list[Part]]:
    """What travels together: moves of one dtype, up to some bytes."""
    of_weight: dict[str, list[Move]] = {}
    for move in recut.moves:
        of_weight.setdefault(move.name, []).append(move)
    batch: list[Part] = []
    size = 0
    for entry in sorted(entries, key=lambda entry: str(entry.dtype)):
        for move in of_weight[entry.weight]:
            for part in move.parts(BATCH_BYTES // entry.dtype.itemsize):
                nbytes = part.numel * entry.dtype.itemsize
                if batch and (entry.dtype != batch[0][0].dtype or size + nbytes > BATCH_BYTES):
                    yield batch
                    batch, size = [], 0
                batch.append((entry, part))
                size += nbytes
    if batch:
        yield batch


def _exchange(
    batch: list[Part],
    recut: Recut,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    everyone: Group,
) -> None:
    """Sends what is lacked elsewhere, and puts what comes into its place."""
    rank, size = everyone.rank, everyone.size
    sizes = [[0] * size for _ in range(size)]
    for _, move in batch:
        sizes[move.source][move.target] += move.numel
    flat = torch.empty(sum(sizes[rank]), dtype=batch[0][0].dtype)
    start = 0
    for _, entry, move in sorted(
        ((m.target, e, m) for e, m in batch if m.source == rank), key=lambda part: part[0]
    ):
        source = own[entry.key][_place(recut.before.flow.weights[move.name], rank, move.region)]
        flat[start : start + move.numel].view(source.shape).copy_(source)
        start += move.numel
    came = all_to_all_v(flat, sizes, everyone, layer=RECUT)
    read = [0] * size
    for entry, move in batch:
        if move.target == rank:
            after = recut.after.flow.weights[move.name]
            target = found[entry.key][_place(after, rank, move.region)]
            begin = read[move.source]
            part = came[move.source][begin : begin + move.numel]
            target.copy_(part.view(target.shape))
            read[move.source] += move.numel


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
