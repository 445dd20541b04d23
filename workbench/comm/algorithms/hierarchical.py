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

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor

from workbench.comm.algorithms.direct import direct
from workbench.comm.algorithms.exchange import Algorithm, Exchange, Rounds
from workbench.comm.algorithms.sums import blocks
from workbench.comm.codecs import rounds as coded
from workbench.comm.codecs.coding import Coding
from workbench.comm.pieces import cut, even

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, as indices in their group."""


def across(
    part: Tensor, length: int, hosts: Hosts, rank: int, coding: Coding | None = None
) -> Rounds:
    """Sums `part`, this rank's segment of its host's sum of `length` elements, over all hosts.

    In place, with the same bits on all who own an element.

    Args:
        part: flat; where it lies is what `even` says for the host's ranks.
        length: elements of the whole.
        hosts: two or more.
        rank: this rank's index in the group.
        coding: of `part` while it travels; None: it stays as it is.
    """
    here = next(index for index, members in enumerate(hosts) if rank in members)
    owners = list(_stripes(len(part), length, hosts, rank, here))
    sizes = [size for size, _ in owners]
    two = len(hosts) == 2
    algorithms: list[Algorithm] = [_of_two if two else direct] * len(sizes)
    if coding is not None:
        by = coded.swap if two else coded.direct
        algorithms = [partial(by, coding=of) for of in coding.cut(sizes)]
    stripes = [
        algorithm(stripe, members, here)
        for algorithm, stripe, (_, members) in zip(
            algorithms, cut(part, sizes), owners, strict=True
        )
    ]
    for together in zip(*stripes, strict=True):
        yield Exchange(
            tuple(piece for exchange in together for piece in exchange.sends),
            tuple(piece for exchange in together for piece in exchange.receives),
            sum(exchange.additions for exchange in together),
        )


def _of_two(flat: Tensor, members: Sequence[int], me: int) -> Rounds:
    """Both send all they have and both add it up: a + b and b + a have the same bits."""
    other, arrived = members[1 - me], flat.new_empty(len(flat))
    yield Exchange(((other, flat),), ((other, arrived),), len(flat))
    for block in blocks(flat):
        flat[block] += arrived[block]


def _stripes(
    owned: int, length: int, hosts: Hosts, rank: int, here: int
) -> Iterator[tuple[int, list[int]]]:
    """Of each stripe in this rank's `owned` elements: how many it has, and who owns it by host."""
    ends = [list(accumulate(even(length, len(members)))) for members in hosts]
    last = ends[here][hosts[here].index(rank)]
    start = last - owned
    while start < last:
        places = [next(i for i, end in enumerate(of) if end > start) for of in ends]
        stop = min(of[i] for of, i in zip(ends, places, strict=True))
        yield stop - start, [members[i] for members, i in zip(hosts, places, strict=True)]
        start = stop
