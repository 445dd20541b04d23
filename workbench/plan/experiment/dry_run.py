"""What an all-reduce algorithm of a person's own exchanges: found by running it without data.

Built-in algorithms have formulas (`predict/traffic/collective_costs.py`). Nobody has one for an own
algorithm; but its ranks, run together in one process on tensors without memory, say all that they
would send. The class that algorithms extend does that, where there is torch; predictions get plain
numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

from workbench.plan.experiment.codec import AnyCodec
from workbench.plan.extension.extension import extension_of
from workbench.plan.extension.own import Own


@dataclass(frozen=True)
class Longest:
    """The longest chains of exchanges that wait for each other; each may be another one.

    A message ends when both of its ranks have begun their rounds, and the busier one of them has
    moved all of its round's bytes; a rank's next round begins when all of its messages have ended.

    Attributes:
        rounds: exchanges in which something travels.
        bytes: the sum over exchanges of what the busier rank sends or receives, whichever is more.
        additions: elements that are added up.
    """

    rounds: int
    bytes: int
    additions: int


@dataclass(frozen=True)
class DryRun:
    """What one all-reduce exchanges, on each rank of its group [ranks].

    Attributes:
        messages: the non-empty messages that each rank receives.
        bytes: the bytes of these messages.
        rounds: successive exchanges in which each rank takes part.
        additions: elements that each rank adds to others.
        pairs: bytes from each rank to each [receiver, sender].
        memory: the most bytes that messages take besides what is summed.
        encoded: values that each rank encodes.
        decoded: values that each rank decodes, those included that it adds.
        pieces: how often each rank encodes or decodes.
        longest: what all of them wait for.
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
            elements: the length of what each rank contributes.
            itemsize: the bytes of an element.
            ranks: the size of the group.
            encoded_bytes: the bytes of so many values that are encoded together; None: they
                travel as they are.

        Raises:
            OwnObjectError: its ranks do not fit together.
        """
        ...


def algorithm_of(own: Own) -> RunsDry:
    """The algorithm itself.

    Raises:
        OwnObjectError: it cannot be loaded, or is none.
    """
    return cast(RunsDry, extension_of(own, "algorithms"))


def dry_run(
    own: Own, elements: int, itemsize: int, ranks: int, codec: AnyCodec | None = None
) -> DryRun:
    """What an own algorithm exchanges in one sum.

    Args:
        own: the algorithm, which must not change once it was given.
        elements: the length of what each rank contributes.
        itemsize: the bytes of an element.
        ranks: the size of the group.
        codec: the codec through which values travel; None: they stay as they are.

    Raises:
        OwnObjectError: it cannot be loaded, or its ranks do not fit together.
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
