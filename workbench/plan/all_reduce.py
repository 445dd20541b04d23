"""The algorithms that ranks can all-reduce with, and which of them "auto" stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["auto", "direct", "ring", "halving_doubling", "hierarchical", "backend"]
"""All of them sum exactly, in different orders; "backend" is what gloo or nccl do themselves."""

CODED: tuple[Algorithm, ...] = ("auto", "direct", "ring", "hierarchical")
"""Those that can send values through a codec."""

MOST_DIRECT = 8
"""Up to so many hosts "auto" with a codec is "direct", and beyond "ring". Both send and code as
much; the first rounds values less often and waits twice, not 2 (k-1) times, but hears all at once.
Where some of several hosts have several ranks, it is "hierarchical"."""


@dataclass(frozen=True)
class Thresholds:
    """Up to how many bytes an algorithm is taken where no two ranks share memory.

    Attributes:
        direct: in bytes; beyond, the backend's own is taken.
    """

    direct: int


THRESHOLDS = Thresholds(direct=2**16)
"""Measured with `python -m workbench.bench collectives`, which has a row for each algorithm over
gloo. Of four ranks on four cores, medians of seven interleaved rounds, in ms:

                      1 KB    1 MB    4 MB    64 MB
    gloo's own         5.1     7.7      10      103
    direct             6.6     8.4      14      191
    ring               8.4     9.5      13      171
    halving_doubling   7.1      10      15      222

Gloo's own has fewer threads to wake, and sums in place; it stays some 10 % faster below 64 KB too,
also over a link of 1 Gbit/s (`bench hierarchical`). Small sums are direct all the same: taken in
rank order, they have the bits that they have in shared memory.
"""


def chosen(
    algorithm: Algorithm,
    hosts: Sequence[int],
    backend: str,
    nbytes: int,
    *,
    beside: bool,
    codec: str = "",
) -> Algorithm:
    """What a group does for `algorithm`: just that, or what "auto" stands for there.

    Args:
        algorithm: as asked for.
        hosts: how many of the group's ranks share the memory of each host; a rank that shares
            none is a host of its own.
        backend: "gloo" or "nccl".
        nbytes: of what is summed on each rank.
        beside: whether it lies in a rank's own memory, and is summed while the rank computes on.
        codec: the name of the codec that it goes through; empty: none.

    Raises:
        ValueError: there is no such algorithm, or it cannot take a codec.
    """
    if algorithm not in get_args(Algorithm):
        names = ", ".join(map(repr, get_args(Algorithm)))
        raise ValueError(f"no all-reduce algorithm {algorithm!r}; there are {names}")
    if codec and algorithm not in CODED:
        names = ", ".join(map(repr, CODED))
        raise ValueError(f"algorithm {algorithm!r} cannot take codec {codec!r}; {names} can")
    if algorithm != "auto":
        return algorithm
    if codec:
        shared = 1 < len(hosts) < sum(hosts)
        return "hierarchical" if shared else "direct" if len(hosts) <= MOST_DIRECT else "ring"
    if len(hosts) == 1:
        return "backend" if beside else "direct"
    if len(hosts) < sum(hosts):
        return "hierarchical"
    if beside or backend != "gloo" or nbytes > THRESHOLDS.direct:
        return "backend"
    return "direct"
