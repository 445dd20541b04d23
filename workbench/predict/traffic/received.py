"""What one call of a collective brings to each rank: messages and bytes, for all groups at once.

A rank of a group receives

    all_gather       the pieces of the others
    reduce_scatter   its own piece from each of the others
    all_to_all       from each of the others what lies in its new piece

and a message for each of these that is not empty. All-reduces are in `summing.py`.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from workbench.plan.placement import Shard
from workbench.predict.traffic.givers import (
    Giver,
    add_exchanged,
    add_gathered,
    add_scattered,
    taken,
)
from workbench.program.hosts import Groups
from workbench.program.rows import Counts


@dataclass(frozen=True)
class Received:
    """On each rank of the world, in one call.

    Attributes:
        messages: non-empty pieces from others.
        bytes: in them.
        givers: say whose they are.
    """

    messages: Counts
    bytes: Counts
    givers: tuple[Giver, ...] = ()


def all_gather(pieces: Counts, groups: Groups) -> Received:
    """Of pieces of so many bytes on each rank."""
    members = np.asarray(groups)
    held = pieces[members]
    messages, received = np.zeros_like(pieces), np.zeros_like(pieces)
    messages[members] = (held > 0).sum(axis=1, keepdims=True) - (held > 0)
    received[members] = held.sum(axis=1, keepdims=True) - held
    return Received(messages, received, (partial(add_gathered, pieces, groups),))


def reduce_scatter(pieces: Counts, groups: Groups) -> Received:
    """Into pieces of so many bytes on each rank."""
    others = len(groups[0]) - 1
    givers = (partial(add_scattered, pieces, groups),)
    return Received((pieces > 0) * others, pieces * others, givers)


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
            others = [taken(source, target, giver, place) for giver in range(len(members))]
            sizes = [n * int(slabs[rank]) for r, n in enumerate(others) if r != place]
            messages[rank] = sum(size > 0 for size in sizes)
            received[rank] = sum(sizes)
    givers = (partial(add_exchanged, slabs, source, target, groups),)
    return Received(messages, received, givers)
