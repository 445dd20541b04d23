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


THRESHOLDS = Thresholds(direct=2**20)


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
