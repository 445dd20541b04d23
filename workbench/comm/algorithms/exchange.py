"""What all-reduce algorithms are made of: rounds in which a rank sends and receives.

An algorithm is a generator. It yields the exchanges of one rank, one after another, and is
resumed when what it wanted to receive is there and what it wanted to send may be overwritten.
It knows neither how tensors travel nor who waits for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Piece = tuple[int, Tensor]  # the other rank's index in the group, and what travels


@dataclass(frozen=True)
class Exchange:
    """One round of one rank: all of its messages are under way at the same time.

    Attributes:
        sends: flat tensors, to whom; empty ones do not travel.
        receives: flat tensors to be filled, from whom. What one rank sends another arrives in
            the order in which it was sent.
        additions: elements that this rank adds to others once they have come.
    """

    sends: tuple[Piece, ...] = ()
    receives: tuple[Piece, ...] = ()
    additions: int = 0


Rounds = Iterator[Exchange]


class Algorithm(Protocol):
    """Sums `flat` in place over `members`, of which this rank is number `me`.

    Afterwards all of them have the same bits. Called by all members with equal lengths.
    """

    def __call__(self, flat: Tensor, members: Sequence[int], me: int) -> Rounds: ...
