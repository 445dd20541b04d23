"""The algorithms that ranks can all-reduce with, and which of them "auto" stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["auto", "direct", "ring", "halving_doubling", "hierarchical", "backend"]
"""All of them sum exactly, in different orders; "backend" is what gloo or nccl do themselves."""


@dataclass(frozen=True)
class Thresholds:
    """Up to how many bytes an algorithm is taken where no two ranks share memory.

    Attributes:
        direct: in bytes; beyond, the backend's own is taken.
    """

    direct: int


THRESHOLDS = Thresholds(direct=2**16)
"""Measured with `python -m workbench.bench collectives`, which has a row for each algorithm over
gloo. Of four ranks on a busy machine of four cores, medians of eight interleaved rounds, in ms:

               1 KiB    64 KiB    1 MiB    4 MiB    16 MiB
    gloo's own   4.9       5.4      6.5     11.5        56
    direct       6.2       6.0      7.2     10.9        76
    ring         8.8       7.7      9.1     11.5        52
    halv.-doub.  6.5       6.7      9.2     14.7        71

There a message takes no time but that of its threads, which gloo's own has fewer of. Small sums are
direct all the same: on a wire 2 rounds instead of 2 (k-1) count, and taken in rank order they have
the bits that they have in shared memory.
"""


def chosen(
    algorithm: Algorithm, hosts: Sequence[int], backend: str, nbytes: int, *, beside: bool
) -> Algorithm:
    """What a group does for `algorithm`: just that, or what "auto" stands for there.

    Args:
        algorithm: as asked for.
        hosts: how many of the group's ranks share the memory of each host; a rank that shares
            none is a host of its own.
        backend: "gloo" or "nccl".
        nbytes: of what is summed on each rank.
        beside: whether it lies in a rank's own memory, and is summed while the rank computes on.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in get_args(Algorithm):
        names = ", ".join(map(repr, get_args(Algorithm)))
        raise ValueError(f"no all-reduce algorithm {algorithm!r}; there are {names}")
    if algorithm != "auto":
        return algorithm
    if len(hosts) == 1:
        return "backend" if beside else "direct"
    if len(hosts) < sum(hosts):
        return "hierarchical"
    if beside or backend != "gloo" or nbytes > THRESHOLDS.direct:
        return "backend"
    return "direct"
