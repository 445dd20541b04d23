"""All-reduce algorithms: their names, those of a person's own, and which one "auto" means where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import BeforeValidator

from workbench.plan.experiment.dry_run import algorithm_of
from workbench.plan.extension.extension import name_of, named
from workbench.plan.extension.own import Own

AlgorithmName = Literal["auto", "direct", "ring", "halving_doubling", "hierarchical", "backend"]
"""The built-in all-reduce algorithms. All sum exactly, in different orders; "backend" is what gloo
or nccl do themselves."""

Algorithm = AlgorithmName | Own
"""An all-reduce algorithm: a built-in one, or an object that extends `wb.extend.Algorithm`."""

A = TypeVar("A", AlgorithmName, Algorithm)

CODED: tuple[AlgorithmName, ...] = ("auto", "direct", "ring", "hierarchical")
"""The built-in algorithms that can send values through a codec."""

MOST_DIRECT = 8
""""auto" with a codec is "direct" up to so many hosts, and "ring" beyond. Both send and encode the
same; "direct" rounds values less often and has 2 rounds, not 2 (k-1), but receives all at once.
Where some of several hosts have several ranks, "auto" is "hierarchical"."""


@dataclass(frozen=True)
class Thresholds:
    """The largest messages of an algorithm, where no two ranks share memory.

    Attributes:
        direct: the most bytes of a "direct" all-reduce; beyond, the backend's own is used.
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
    algorithm: A,
    hosts: Sequence[int],
    backend: str,
    nbytes: int,
    *,
    beside: bool,
    codec: str = "",
) -> A:
    """The algorithm that a group uses for `algorithm`: itself, or the one that "auto" means there.

    Args:
        algorithm: the algorithm that is asked for.
        hosts: how many of the group's ranks share the memory of each host; a rank that shares none
            is a host of its own.
        backend: the torch.distributed backend: "gloo" or "nccl".
        nbytes: the bytes that each rank contributes.
        beside: whether the data are in a rank's own memory, and are reduced while the rank
            computes.
        codec: the name of the codec that the data are compressed with; "": none.

    Raises:
        ValueError: an unknown algorithm, or one that cannot take a codec.
        OwnObjectError: an own algorithm that is to take a codec cannot be loaded.
    """
    if isinstance(algorithm, Own):
        if codec and not algorithm_of(algorithm).takes_codec:
            raise ValueError(
                f"algorithm {name_of(algorithm)!r} cannot take codec {codec!r}: it has no "
                "coded_rounds"
            )
        return algorithm
    if algorithm not in get_args(AlgorithmName):
        names = ", ".join(map(repr, get_args(AlgorithmName)))
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


def _as_algorithm(given: object) -> object:
    return named(given, "algorithms", get_args(AlgorithmName))


NamedAlgorithm = Annotated[Algorithm, BeforeValidator(_as_algorithm)]
"""A field that takes the name of a built-in algorithm, or one of a person's own: an object, its
class, "module:attribute", or the name under which an installed package offers it."""
