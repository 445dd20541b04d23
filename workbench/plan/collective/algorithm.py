"""What an all-reduce algorithm of a person's own exchanges: found by running it without data.

Built-in algorithms have formulas (`predict/traffic/collective_costs.py`). Nobody has one for an own
algorithm; but its ranks, run together in one process on tensors without memory, say all that they
would send. The class that algorithms extend does that, where there is torch; predictions get plain
numbers.

All-reduce algorithms: their names, those of a person's own, and which one "auto" means where.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Protocol, TypeVar, cast, get_args

from pydantic import BeforeValidator

from workbench.plan.collective.codec import AnyCodec
from workbench.plan.extension.extension import extension_of, name_of, named
from workbench.plan.extension.user_object import Own


@dataclass(frozen=True)
class Longest:
    """The longest chains of exchanges that wait for each other; each may be another one.

    A message ends when both of its ranks have begun their rounds, and the busier one of them has
    moved all of its round's bytes; a rank's next round begins when all of its messages have ended.

    Attributes:
        rounds: exchanges in which something travels.
        bytes: the sum over exchanges of what the busier rank sends or receives, whichever is more.
    """

    rounds: int
    bytes: int
    additions: int


@dataclass(frozen=True)
class DryRun:
    """What one all-reduce exchanges, on each rank of its group [ranks].

    Attributes:
        pairs: bytes from each rank to each [receiver, sender].
        memory: the most bytes that messages take besides what is summed.
        decoded: values that each rank decodes, those included that it adds.
        pieces: how often each rank encodes or decodes.
    """

    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    rounds: tuple[int, ...]
    additions: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    encoded: tuple[int, ...]
    decoded: tuple[int, ...]
    pieces: tuple[int, ...]
    longest: Longest


class RunsDry(Protocol):
    """An all-reduce algorithm, as far as predictions know it."""

    @property
    def takes_codec(self) -> bool:
        """Whether values can travel through a codec."""
        ...

    def dry(
        self,
        elements: int,
        itemsize: int,
        ranks: int,
        encoded_bytes: Callable[[int], int] | None = None,
    ) -> DryRun:
        """Runs all ranks on tensors without values.

        Args:
            encoded_bytes: the bytes of so many values that are encoded together; None: they
                travel as they are.
        """
        ...


def algorithm_of(own: Own) -> RunsDry:
    """The algorithm itself."""
    return cast(RunsDry, extension_of(own, "algorithms"))


def dry_run(
    own: Own, elements: int, itemsize: int, ranks: int, codec: AnyCodec | None = None
) -> DryRun:
    """What an own algorithm exchanges in one sum.

    Args:
        own: the algorithm, which must not change once it was given.
    """
    return _dry_run(_Identified(own), elements, itemsize, ranks, codec)


class _Identified:
    """An object that equals itself only; it is kept, so that no other gets its identity."""

    def __init__(self, own: Own) -> None:
        self.own, self._found = own, own.loaded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identified) and self._found is other._found

    def __hash__(self) -> int:
        return id(self._found)


@lru_cache(maxsize=4096)
def _dry_run(
    found: _Identified, elements: int, itemsize: int, ranks: int, codec: AnyCodec | None
) -> DryRun:
    sized = None if codec is None else codec.encoded_bytes
    return algorithm_of(found.own).dry(elements, itemsize, ranks, sized)


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
        hosts: how many of the group's ranks share the memory of each host; a rank that shares none
            is a host of its own.
        beside: whether the data are in a rank's own memory, and are reduced while the rank
            computes.
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
