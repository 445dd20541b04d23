"""The collectives through shared memory: every byte is staged once, and read into its place.

What fits into a slot takes one meeting (an all-reduce, where that is faster, two); more passes in
portions, of which one is read while the next is staged. Results are the caller's own, contiguous,
and of the same bits on all ranks, for sums are taken in rank order wherever they are taken.

All ranks of the group call the same function with arguments that agree; `what` goes into errors,
and `mark` hears of the phases of what an all-reduce is made of.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from workbench.comm.algorithms.sums import added
from workbench.comm.groups.phases import Mark, unheard
from workbench.comm.pieces import cut, pack, resized, shaped, unpack
from workbench.comm.shared_memory.portions import portions_of
from workbench.comm.shared_memory.staging import SLOT_BYTES, Staging
from workbench.plan.placement import Shard

# Up to here every rank sums everything, after one meeting; beyond, each sums its segment, and a
# second meeting follows. On four busy cores a meeting takes longer than reading this much.
ONE_MEETING_BYTES = 2**16


def all_gather(
    x: Tensor, shard: Shard, staging: Staging, what: object, mark: Mark = unheard
) -> Tensor:
    """The tensor of which x is this rank's piece."""
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
    portions = portions_of(rows, max(widths), SLOT_BYTES // x.itemsize)

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
    x: Tensor, shard: Shard, staging: Staging, what: object, mark: Mark = unheard
) -> Tensor:
    """This rank's piece of the sum of all ranks' x."""
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
    portions = portions_of(rows, shard.extent * size, SLOT_BYTES // x.itemsize - staging.size)

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
                target.dim, *_given(source, target, rank, staging.rank)
            )
            for rank, shape in enumerate(shapes)
        ]
        return torch.cat(parts, source.dim)
    ranks = range(staging.size)
    given = [[_given(source, target, a, b)[1] for b in ranks] for a in ranks]
    lengths = [
        [prod(resized(shape, target.dim, n)) for n in row]
        for shape, row in zip(shapes, given, strict=True)
    ]
    flat = pack(x, target.dim, given[staging.rank])
    taken: Sequence[int] = source.sizes
    if source.dim == target.dim:
        taken = [row[staging.rank] for row in given]
    shape = resized(x.shape, target.dim, target.sizes[staging.rank])
    shape = resized(shape, source.dim, sum(taken))
    return unpack(_swap(flat, lengths, staging, what), shape, source.dim, taken)


def all_reduce(x: Tensor, staging: Staging, what: object, mark: Mark = unheard) -> Tensor:
    """The sum of all ranks' x."""
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
    """What the rank at index `root` has as x."""
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


def _given(source: Shard, target: Shard, giver: int, taker: int) -> tuple[int, int]:
    """(start, length) along `target.dim`, in the giver's piece, of what the taker gets of it."""
    start, length = target.span(taker)
    if source.dim != target.dim:
        return start, length
    own, size = source.span(giver)
    begin, end = max(start, own), min(start + length, own + size)
    return (begin - own, end - begin) if begin < end else (0, 0)


def _swap(flat: Tensor, lengths: list[list[int]], staging: Staging, what: object) -> Tensor:
    """What came for this rank, in rank order; `lengths[a][b]` elements go from a to b.

    `flat` holds what this rank sends, in rank order.
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
