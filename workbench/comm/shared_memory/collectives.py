"""The collectives through shared memory: every byte is staged once, and read into its place.

What fits into a slot takes one meeting (an all-reduce, where that is faster, two); more passes in
portions, of which one is read while the next is staged. Results are the caller's own, contiguous,
and of the same bits on all ranks, for sums are taken in rank order wherever they are taken.

All ranks of the group call the same function with arguments that agree; `what` goes into errors,
and `mark` hears of the phases of what an all-reduce is made of. What each does to its arguments is
said in `collectives.py` and `all_reduce.py` of the folder above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from workbench.comm.messages.flat import added, cut, pack, resized, shaped, unpack
from workbench.comm.messages.recorder import PhaseMark, unheard
from workbench.comm.shared_memory.meeting import SLOT_BYTES, Staging
from workbench.plan.placement.placement import Shard

# Up to here every rank sums everything, after one meeting; beyond, each sums its segment, and a
# second meeting follows. On four busy cores a meeting takes longer than reading this much.
ONE_MEETING_BYTES = 2**16


def all_gather(
    x: Tensor, shard: Shard, staging: Staging, what: object, mark: PhaseMark = unheard
) -> Tensor:
    """Returns the tensor of which x is this rank's piece."""
    dim, shape = shard.dim, resized(x.shape, shard.dim, shard.extent)
    rows = prod(shape[:dim])
    widths = [size * prod(shape[dim + 1 :]) for size in shard.sizes]
    if prod(shape) == 0:
        return x.new_empty(shape)
    staging.begin(what, prod(shape) * x.itemsize)
    if rows * max(widths) * x.itemsize <= SLOT_BYTES:
        mark("send")
        staging.staged(x.dtype, tuple(x.shape))[staging.rank].copy_(x)
        staging.meet(what, mark)
        mark("copy")
        return torch.cat(
            [
                staging.staged(x.dtype, resized(shape, dim, size), 1)[rank]
                for rank, size in enumerate(shard.sizes)
            ],
            dim,
        )
    result = x.new_empty(shape)
    mine, places = x.reshape(rows, -1), cut(result.view(rows, -1), widths, 1)
    portions = _portions(rows, max(widths), SLOT_BYTES // x.itemsize)

    def put(index: int) -> None:
        mark("send")
        block = portions[index].of(mine)
        staging.staged(x.dtype, tuple(block.shape))[staging.rank].copy_(block)

    def take(index: int) -> None:
        mark("copy")
        for rank, place in enumerate(places):
            block = portions[index].of(place)
            if rank == staging.rank:
                block.copy_(portions[index].of(mine))
            else:
                block.copy_(staging.staged(x.dtype, tuple(block.shape), 1)[rank])

    staging.stream(len(portions), put, take, what, mark)
    return result


def reduce_scatter(
    x: Tensor, shard: Shard, staging: Staging, what: object, mark: PhaseMark = unheard
) -> Tensor:
    """Returns this rank's piece of the sum of all ranks' x."""
    dim, shape = shard.dim, resized(x.shape, shard.dim, shard.sizes[staging.rank])
    if x.numel() == 0:
        return x.new_empty(shape)
    staging.begin(what, x.nbytes)
    span = shard.span(staging.rank)
    if x.nbytes <= SLOT_BYTES:
        mark("send")
        staging.staged(x.dtype, tuple(x.shape))[staging.rank].copy_(x)
        staging.meet(what, mark)
        mark("reduce")
        staged = staging.staged(x.dtype, tuple(x.shape), 1)
        return added([whole.narrow(dim, *span) for whole in staged])
    rows, size = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    result = x.new_empty(shape)
    pieces = cut(x.reshape(rows, -1), [n * size for n in shard.sizes], 1)
    place = result.view(rows, shard.sizes[staging.rank] * size)
    # One element more for each piece: portions of pieces are rounded.
    portions = _portions(rows, shard.extent * size, SLOT_BYTES // x.itemsize - staging.size)

    def blocks(index: int, ago: int) -> list[tuple[Tensor, ...]]:
        own = tuple(portions[index].of(piece) for piece in pieces)
        widths = [block.shape[1] for block in own]
        whole = (own[0].shape[0], sum(widths))
        return [own, *(cut(slot, widths, 1) for slot in staging.staged(x.dtype, whole, ago))]

    def put(index: int) -> None:
        mark("send")
        own, *slots = blocks(index, 0)
        for block, slot in zip(own, slots[staging.rank], strict=True):
            slot.copy_(block)

    def take(index: int) -> None:
        mark("reduce")
        _, *slots = blocks(index, 1)
        added([slot[staging.rank] for slot in slots], portions[index].of(place))

    staging.stream(len(portions), put, take, what, mark)
    return result


def all_to_all(x: Tensor, source: Shard, target: Shard, staging: Staging, what: object) -> Tensor:
    """Turns x, this rank's piece of a tensor cut by `source`, into its piece by `target`."""
    whole = resized(resized(x.shape, source.dim, source.extent), target.dim, target.extent)
    if prod(whole) == 0:
        return x.new_empty(resized(whole, target.dim, target.sizes[staging.rank]))
    staging.begin(what, prod(whole) * x.itemsize)
    shapes = [resized(x.shape, source.dim, size) for size in source.sizes]
    if max(map(prod, shapes)) * x.itemsize <= SLOT_BYTES:
        staging.staged(x.dtype, tuple(x.shape))[staging.rank].copy_(x)
        staging.meet(what)
        parts = [
            staging.staged(x.dtype, shape, 1)[rank].narrow(
                target.dim, *_sent(source, target, rank, staging.rank)
            )
            for rank, shape in enumerate(shapes)
        ]
        return torch.cat(parts, source.dim)
    ranks = range(staging.size)
    sent = [[_sent(source, target, a, b)[1] for b in ranks] for a in ranks]
    lengths = [
        [prod(resized(shape, target.dim, n)) for n in row]
        for shape, row in zip(shapes, sent, strict=True)
    ]
    flat = pack(x, target.dim, sent[staging.rank])
    received: Sequence[int] = source.sizes
    if source.dim == target.dim:
        received = [row[staging.rank] for row in sent]
    shape = resized(x.shape, target.dim, target.sizes[staging.rank])
    shape = resized(shape, source.dim, sum(received))
    return unpack(_swap(flat, lengths, staging, what), shape, source.dim, received)


def all_to_all_v(
    flat: Tensor, lengths: Sequence[Sequence[int]], staging: Staging, what: object
) -> Tensor:
    """Returns what came for this rank, in rank order, where `lengths[a][b]` go from a to b."""
    if max(map(sum, lengths)) == 0:
        return flat.new_empty(0)
    # Their sum alone would not tell apart two ranks with different lengths.
    staging.begin(what, hash(tuple(map(tuple, lengths))) % 2**31 * flat.itemsize)
    return _swap(flat, lengths, staging, what)


def all_reduce(x: Tensor, staging: Staging, what: object, mark: PhaseMark = unheard) -> Tensor:
    """Returns the sum of all ranks' x."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    staging.begin(what, x.nbytes)
    if x.nbytes <= ONE_MEETING_BYTES:
        shape = tuple(x.shape)
        mark("send")
        staging.staged(x.dtype, shape)[staging.rank].copy_(x)
        staging.meet(what, mark)
        mark("reduce")
        return added(staging.staged(x.dtype, shape, 1))
    flat, result = x.reshape(-1), x.new_empty((x.numel(),))
    portions = flat.split(SLOT_BYTES // x.itemsize)
    places = result.split(SLOT_BYTES // x.itemsize)
    # While one portion is staged, the one before is summed, and the one before that fetched.
    for step in range(len(portions) + 2):
        if step < len(portions):
            mark("send")
            portion = portions[step]
            staging.staged(x.dtype, tuple(portion.shape))[staging.rank].copy_(portion)
        if 1 <= step <= len(portions):
            mark("reduce")
            slots = staging.segments(x.dtype, len(portions[step - 1]), 1)
            mine = cut(places[step - 1], [len(part) for part in slots[0]])[staging.rank]
            added([slot[staging.rank] for slot in slots], mine)
            slots[staging.rank][staging.rank].copy_(mine)
        if step >= 2:
            mark("copy")
            slots = staging.segments(x.dtype, len(portions[step - 2]), 2)
            places_of = cut(places[step - 2], [len(part) for part in slots[0]])
            for rank, place in enumerate(places_of):
                if rank != staging.rank:
                    place.copy_(slots[rank][rank])
        if step <= len(portions):
            staging.meet(what, mark)
    return shaped(result, x.shape)


def broadcast(x: Tensor, root: int, staging: Staging, what: object) -> Tensor:
    """Returns what the rank at index `root` has as x."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    staging.begin(what, x.nbytes)
    flat, result = x.reshape(-1), x.new_empty((x.numel(),))
    portions = flat.split(SLOT_BYTES // x.itemsize)
    places = result.split(SLOT_BYTES // x.itemsize)

    def put(index: int) -> None:
        if staging.rank == root:
            portion = portions[index]
            staging.staged(x.dtype, tuple(portion.shape))[root].copy_(portion)

    def take(index: int) -> None:
        place = places[index]
        place.copy_(staging.staged(x.dtype, tuple(place.shape), 1)[root])

    staging.stream(len(portions), put, take, what)
    return shaped(result, x.shape)


def _sent(source: Shard, target: Shard, sender: int, receiver: int) -> tuple[int, int]:
    """Returns (start, length) along `target.dim` of the receiver's part of the sender's piece."""
    start, length = target.span(receiver)
    if source.dim != target.dim:
        return start, length
    own, size = source.span(sender)
    begin, end = max(start, own), min(start + length, own + size)
    return (begin - own, end - begin) if begin < end else (0, 0)


def _swap(flat: Tensor, lengths: Sequence[Sequence[int]], staging: Staging, what: object) -> Tensor:
    """Returns what came for this rank, in rank order; some rank sends something.

    Args:
        flat: what this rank sends [sum(lengths[rank])], in rank order.
        lengths: the number of elements that go from rank a to rank b, as `lengths[a][b]`.
        staging: the shared memory.
    """
    me, size = staging.rank, staging.size
    result = flat.new_empty((sum(row[me] for row in lengths),))
    sources, places = cut(flat, lengths[me]), cut(result, [row[me] for row in lengths])
    # One element more for each piece: portions of pieces are rounded.
    parts = -(-max(map(sum, lengths)) // (SLOT_BYTES // flat.itemsize - size))

    def span(length: int, part: int) -> slice:
        return slice(length * part // parts, length * (part + 1) // parts)

    def slot(rank: int, part: int, ago: int) -> tuple[Tensor, ...]:
        cuts = [span(n, part) for n in lengths[rank]]
        sizes = [piece.stop - piece.start for piece in cuts]
        return cut(staging.staged(flat.dtype, (sum(sizes),), ago)[rank], sizes)

    def put(part: int) -> None:
        for source, place in zip(sources, slot(me, part, 0), strict=True):
            place.copy_(source[span(len(source), part)])

    def take(part: int) -> None:
        for rank, place in enumerate(places):
            place[span(len(place), part)] = slot(rank, part, 1)[me]

    staging.stream(parts, put, take, what)
    return result


@dataclass(frozen=True)
class _Portion:
    """Some rows of a matrix, and of its columns the part from `part / parts` on."""

    rows: slice
    part: int
    parts: int

    def of(self, matrix: Tensor) -> Tensor:
        """Returns a view of this portion of `matrix`, whatever its width."""
        width = matrix.shape[1]
        begin, end = width * self.part // self.parts, width * (self.part + 1) // self.parts
        return matrix[self.rows, begin:end]


def _portions(rows: int, width: int, limit: int) -> list[_Portion]:
    """Cuts a matrix into portions of at most `limit` elements, whole rows where they fit."""
    if width <= limit:
        step = limit // width
        return [_Portion(slice(i, min(i + step, rows)), 0, 1) for i in range(0, rows, step)]
    parts = -(-width // limit)
    return [_Portion(slice(i, i + 1), p, parts) for i in range(rows) for p in range(parts)]
