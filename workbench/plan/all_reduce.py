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
gloo. Of four ranks on a busy machine of four cores, medians of three interleaved rounds, in ms:

                      1 KB    1 MB    4 MB    64 MB
    gloo's own         9.2      10      13       95
    direct              11       9      14      178
    ring                16      12      17      169
    halving_doubling    12      12      18      192

There a message takes no time but that of its threads, of which gloo's own has fewer, and it sums in
place. Small sums are direct all the same: on a wire 2 rounds count, instead of 2 (k-1), and taken
in rank order they have the bits that they have in shared memory.
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
