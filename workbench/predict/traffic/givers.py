"""Whose the bytes are that a collective brings, of every pair of ranks.

A `Giver` adds to a table [taker, giver] of the world what one call brings, `times` by taker:

    all_gather       from each of the others its piece
    reduce_scatter   from each of the others as much as the own piece
    all_to_all       from each of the others what lies in the own new piece
    direct           from each of the others a part of the own segment, and then theirs whole
    ring             everything from the rank before
    halving-doubling from the rank at each distance what is kept, and later what was given away
    hierarchical     direct within each host, and of each stripe from its owners on other hosts
    reduce, broadcast    from all to the server, and from it to all

Derived from the algorithms' descriptions, as `collective_costs` is, which has their sources; each
row adds up to what is received there.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.placement import Shard
from workbench.predict.traffic.collective_costs import encoded, segments
from workbench.program.hosts import Groups
from workbench.program.rows import Counts

Table = NDArray[np.int64]
Giver = Callable[[Table, Counts], None]


class Part(NamedTuple):
    """All-reduces that are alike.

    Attributes:
        name: of the algorithm.
        length: elements.
        itemsize: bytes of one.
        codec: that they go through.
        times: how many there are.
    """

    name: Algorithm
    length: int
    itemsize: int
    codec: Codec | None
    times: int


def add_gathered(pieces: Counts, groups: Groups, table: Table, times: Counts) -> None:
    """An all-gather of pieces of so many bytes on each rank."""
    for members in map(list, groups):
        _add(np.tile(pieces[members], (len(members), 1)), members, table, times)


def add_scattered(pieces: Counts, groups: Groups, table: Table, times: Counts) -> None:
    """A reduce-scatter into pieces of so many bytes on each rank."""
    for members in map(list, groups):
        _add(np.tile(pieces[members][:, None], (1, len(members))), members, table, times)


def add_exchanged(
    slabs: Counts, source: Shard, target: Shard, groups: Groups, table: Table, times: Counts
) -> None:
    """An all-to-all; see `received.all_to_all`."""
    for members in map(list, groups):
        size = range(len(members))
        common = np.array(
            [[taken(source, target, giver, taker) for giver in size] for taker in size]
        )
        _add(common * slabs[members][:, None], members, table, times)


def add_served(
    serves: NDArray[np.bool_],
    bytes_: Counts,
    groups: Groups,
    table: Table,
    times: Counts,
    *,
    up: bool,
) -> None:
    """Gradients of so many bytes to those who serve, or weights back from them."""
    for members in map(list, groups):
        here = serves[members]
        takes = here[:, None] & ~here if up else ~here[:, None] & here
        _add(takes * bytes_[members][:, None], members, table, times)


def add_summed(
    parts: Sequence[Part], hosts: tuple[int, ...], members: Table, table: Table, times: Counts
) -> None:
    """All-reduces on groups [groups, ranks] that all lie on hosts in this way."""
    block = sum((summed(part, hosts) * part.times for part in parts), np.zeros((1, 1), np.int64))
    for own in members.tolist():
        _add(block, own, table, times)


def summed(part: Part, hosts: Sequence[int]) -> Table:
    """What one all-reduce brings to each rank of a group, from each [ranks, ranks].

    Args:
        part: which.
        hosts: how many of the group's ranks each host has.
    """
    ranks = sum(hosts)
    match part.name:
        case "ring":
            return _ring(part, ranks)
        case "halving_doubling":
            return _halving_doubling(part, ranks)
        case "hierarchical":
            return _hierarchical(part, hosts)
        case _:
            return _direct(part.length, part.itemsize, ranks, part.codec)


def taken(source: Shard, target: Shard, giver: int, taker: int) -> int:
    """Indices of the cut dimensions that one piece before and another after have in common."""
    if source.dim != target.dim:
        return source.sizes[giver] * target.sizes[taker]
    (begin, length), (other, size) = source.span(giver), target.span(taker)
    return max(0, min(begin + length, other + size) - max(begin, other))


def _add(block: Table, members: list[int], table: Table, times: Counts) -> None:
    """Adds what members bring each other; nobody brings himself anything."""
    found = block * times[members][:, None]
    np.fill_diagonal(found, 0)
    table[np.ix_(members, members)] += found


def _direct(length: int, itemsize: int, ranks: int, codec: Codec | None) -> Table:
    own = encoded(segments(length, ranks), itemsize, codec)
    found: Table = own[:, None] + own[None, :]
    np.fill_diagonal(found, 0)
    return found


def _ring(part: Part, ranks: int) -> Table:
    found = np.zeros((ranks, ranks), dtype=np.int64)
    if ranks > 1:
        sizes = encoded(segments(part.length, ranks), part.itemsize, part.codec)
        before = (np.arange(ranks) - 1) % ranks
        found[np.arange(ranks), before] = 2 * sizes.sum() - sizes - sizes[before]
    return found


def _halving_doubling(part: Part, ranks: int) -> Table:
    found = np.zeros((ranks, ranks), dtype=np.int64)
    power = 2 ** (ranks.bit_length() - 1)
    ends = np.concatenate([[0], np.cumsum(segments(part.length, power))]) * part.itemsize
    rank = np.arange(power)
    for distance in (2**level for level in range(power.bit_length() - 1)):
        for number in (rank // distance, rank // distance ^ 1):
            sizes = ends[(number + 1) * distance] - ends[number * distance]
            found[rank, rank ^ distance] += sizes
    folded = np.arange(power, ranks)
    found[folded, folded - power] = found[folded - power, folded] = part.length * part.itemsize
    return found


def _hierarchical(part: Part, hosts: Sequence[int]) -> Table:
    found = np.zeros((sum(hosts), sum(hosts)), dtype=np.int64)
    first = np.cumsum([0, *hosts[:-1]])
    ends = [np.cumsum(segments(part.length, ranks)) for ranks in hosts]
    for start, ranks in zip(first, hosts, strict=True):
        here = slice(start, start + ranks)
        found[here, here] = _direct(part.length, part.itemsize, ranks, None)
    cuts = sorted({0, *(int(end) for own in ends for end in own)})
    for begin, end in pairwise(cuts):
        owners = [
            int(start + np.searchsorted(own, begin, side="right"))
            for start, own in zip(first, ends, strict=True)
        ]
        moved = _across(end - begin, part.itemsize, len(hosts), part.codec)
        found[np.ix_(owners, owners)] += moved
    return found


def _across(length: int, itemsize: int, hosts: int, codec: Codec | None) -> Table:
    """Between two hosts each sends all at once; between more it is direct."""
    if hosts == 2:
        (size,) = encoded(np.array([length]), itemsize, codec)
        return np.array([[0, size], [size, 0]], dtype=np.int64)
    return _direct(length, itemsize, hosts, codec)
