"""Hierarchical all-reduce: within hosts through shared memory, across hosts one segment a rank.

The ranks of a host of n sum among themselves, each its own of n near-equal segments; then each
sums its segment with those who own the same elements on the other hosts, and the host gathers.
Over a host's wire goes each element once in each direction for two hosts, 2 (m-1)/m times for m,
and each of its ranks carries an n-th of that. Flat algorithms send what n ranks have.

Hosts may have different numbers of ranks. Their segments then differ, and where those of several
hosts overlap is a stripe, which its owners, one on each host, sum among themselves: of two hosts
both send all and add; of more, as in `direct`.

A half type is rounded twice: the sum of a host, and that of the hosts. A codec sees only what goes
from host to host.

Source: the scheme of Goyal et al. 2017 (arXiv:1706.02677, sec. 4.1: within servers, across, within)
with a wire for every rank; stripes for unequal hosts are ours.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor

from workbench.comm.algorithms.executor import MOST_AT_ONCE, RoundExecutor
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.groups.group import GroupCall, GroupLink
from workbench.comm.messages.flat import HostGroups, MessageRound, MessageRounds, blocks, cut, even
from workbench.comm.shared_memory import collectives as shared
from workbench.plan.placement.placement import Shard

_Rounds = Callable[[Tensor, Sequence[int], int], MessageRounds]


def across(
    part: Tensor, length: int, hosts: HostGroups, rank: int, coding: PieceCoding | None = None
) -> MessageRounds:
    """Sums `part` in place over all hosts, with the same bits on all who own an element.

    Args:
        part: this rank's segment [elements] of its host's sum; where it lies in that is what
            `even` says for the host's ranks.
        hosts: the ranks of each host; two hosts or more.
        coding: what encodes `part` while it travels; None: it stays as it is.
    """
    here = next(index for index, members in enumerate(hosts) if rank in members)
    owners = list(_stripes(len(part), length, hosts, rank, here))
    sizes = [size for size, _ in owners]
    two = len(hosts) == 2
    exact = _of_two if two else FLAT["direct"].rounds
    algorithms: list[_Rounds] = [exact] * len(sizes)
    if coding is not None:
        by = _coded_of_two if two else FLAT["direct"].coded_rounds
        algorithms = [partial(by, coding=own) for own in coding.cut(sizes)]
    stripes = [
        algorithm(stripe, members, here)
        for algorithm, stripe, (_, members) in zip(
            algorithms, cut(part, sizes), owners, strict=True
        )
    ]
    for together in zip(*stripes, strict=True):
        yield MessageRound(
            tuple(piece for exchange in together for piece in exchange.sends),
            tuple(piece for exchange in together for piece in exchange.receives),
            sum(exchange.additions for exchange in together),
        )


def _of_two(flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
    """Sums between two: both send all they have and add; a + b and b + a have the same bits."""
    other, arrived = members[1 - me], flat.new_empty(len(flat))
    yield MessageRound(((other, flat),), ((other, arrived),), len(flat))
    for block in blocks(flat):
        flat[block] += arrived[block]


def _coded_of_two(
    flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding
) -> MessageRounds:
    """Sums between two in one round: both add up what both have encoded, rounded once."""
    mine, theirs = coding.buffers([len(flat)] * 2)
    coding.encode(flat, mine)
    yield MessageRound(((members[1 - me], mine),), ((members[1 - me], theirs),), len(flat))
    coding.decode(mine, flat)
    coding.add(theirs, flat)  # a + b and b + a have the same bits


def _stripes(
    owned: int, length: int, hosts: HostGroups, rank: int, here: int
) -> Iterator[tuple[int, list[int]]]:
    """Yields (elements, its owner on each host) of each stripe in this rank's `owned` elements."""
    ends = [list(accumulate(even(length, len(members)))) for members in hosts]
    last = ends[here][hosts[here].index(rank)]
    start = last - owned
    while start < last:
        places = [next(i for i, end in enumerate(own) if end > start) for own in ends]
        stop = min(own[i] for own, i in zip(ends, places, strict=True))
        yield stop - start, [members[i] for members, i in zip(hosts, places, strict=True)]
        start = stop


def sum_over_hosts(
    flat: Tensor,
    link: GroupLink,
    call: GroupCall,
    portion_bytes: int,
    coding: PieceCoding | None = None,
) -> None:
    """Sums `flat`, in this rank's own memory, in place over all ranks of a group.

    While a portion is on its way to other hosts, the next ones are summed within this one.

    Args:
        flat: the summand [elements], contiguous.
        portion_bytes: the approximate size of a portion, the same on all ranks. Ranks that sum a
            shared buffer sum one portion, so with them it is the size of `flat`.
        coding: what encodes what goes from host to host; None: it stays as it is.

    Raises:
        CommError: other ranks did not come, or came for something else.
    """
    local = link.local
    length = max(1, portion_bytes // flat.itemsize, -(-len(flat) // MOST_AT_ONCE))
    begun = []
    portions = flat.split(length)
    codings = [None] * len(portions) if coding is None else coding.cut([*map(len, portions)])
    for index, (portion, own) in enumerate(zip(portions, codings, strict=True)):
        part, shard = portion, Shard(0, (len(portion),))
        if local is not None:
            shard = Shard(0, even(len(portion), local.size))
            call.count_two_rounds(len(portion), flat.itemsize, link.beside(call.group.rank))
            part = shared.reduce_scatter(portion, shard, local, call, call.mark)
            own = None if own is None else own.cut(shard.sizes)[local.rank]
        rounds = across(part, len(portion), link.hosts, call.group.rank, own)
        executor = RoundExecutor(rounds, call, index)
        link.watch.also(executor.advance)  # while this rank waits for another portion
        begun.append((portion, part, shard, executor))
    for portion, part, shard, executor in begun:
        executor.wait()
        if local is not None:
            portion.copy_(shared.all_gather(part, shard, local, call, call.mark))
