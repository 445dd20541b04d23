"""What one call of a collective brings to each rank: messages and bytes, for all groups at once.

A rank of a group receives

    all_gather       the pieces of the others
    reduce_scatter   its own piece from each of the others
    all_to_all       from each of the others what lies in its new piece

and a message for each of these that is not empty. All-reduces are in `summing.py`.
"""

from dataclasses import dataclass

import numpy as np

from workbench.plan.placement import Shard
from workbench.predict.hosts import Groups
from workbench.predict.rows import Counts


@dataclass(frozen=True)
class Received:
    """On each rank of the world, in one call.

    Attributes:
        messages: non-empty pieces from others.
        bytes: in them.
    """

    messages: Counts
    bytes: Counts


def all_gather(pieces: Counts, groups: Groups) -> Received:
    """Of pieces of so many bytes on each rank."""
    members = np.asarray(groups)
    held = pieces[members]
    messages, received = np.zeros_like(pieces), np.zeros_like(pieces)
    messages[members] = (held > 0).sum(axis=1, keepdims=True) - (held > 0)
    received[members] = held.sum(axis=1, keepdims=True) - held
    return Received(messages, received)


def reduce_scatter(pieces: Counts, groups: Groups) -> Received:
    """Into pieces of so many bytes on each rank."""
    others = len(groups[0]) - 1
    return Received((pieces > 0) * others, pieces * others)


def all_to_all(slabs: Counts, source: Shard, target: Shard, groups: Groups) -> Received:
    """From the pieces of one cut to those of another.

    Args:
        slabs: on each rank, bytes of the group's tensor for one index of each cut dimension.
        source: the cut before, of one group; its pieces are its ranks'.
        target: the cut after.
        groups: which are cut alike.
    """
    messages, received = np.zeros_like(slabs), np.zeros_like(slabs)
    for members in groups:
        for place, rank in enumerate(members):
            others = [_taken(source, target, giver, place) for giver in range(len(members))]
            sizes = [n * int(slabs[rank]) for r, n in enumerate(others) if r != place]
            messages[rank] = sum(size > 0 for size in sizes)
            received[rank] = sum(sizes)
    return Received(messages, received)


def _taken(source: Shard, target: Shard, giver: int, taker: int) -> int:
    """Indices of the cut dimensions that one piece before and another after have in common."""
    if source.dim != target.dim:
        return source.sizes[giver] * target.sizes[taker]
    (begin, length), (other, size) = source.span(giver), target.span(taker)
    return max(0, min(begin + length, other + size) - max(begin, other))
