"""What all-reduce algorithms are made of: rounds in which a rank sends and receives.

An algorithm is a generator. It yields the exchanges of one rank, one after another, and is
resumed when what it wanted to receive is there and what it wanted to send may be overwritten.
It knows neither how tensors travel nor who waits for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Message = tuple[int, Tensor]
"""(index of the other rank in the group, the flat tensor that travels)."""

HostGroups = tuple[tuple[int, ...], ...]
"""The ranks of each host, as indices in their group."""


@dataclass(frozen=True)
class MessageRound:
    """One round of one rank: all of its messages are under way at the same time.

    Attributes:
        sends: the flat tensors that this rank sends, and to whom; empty ones do not travel.
        receives: the flat tensors to be filled, and from whom. What one rank sends another
            arrives in the order in which it was sent.
        additions: the number of elements that this rank adds to others once they have come.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    additions: int = 0


MessageRounds = Iterator[MessageRound]


class AsyncOperation(Protocol):
    """Something under way, which goes on beside other work whenever somebody advances it."""

    def advance(self) -> bool:
        """Does what has become possible without waiting; returns whether all is done."""
        ...

    def wait(self) -> None:
        """Returns when all is done.

        Raises:
            CommError: other ranks did not come, as for a collective that blocks.
        """
        ...
