"""Work of this rank that goes on beside other work, a step whenever somebody looks after it."""

from typing import Protocol


class Progress(Protocol):
    """Something under way."""

    def advance(self) -> bool:
        """Does what has become possible, and waits for nothing; whether it is done."""
        ...

    def wait(self) -> None:
        """Returns when it is done.

        Raises:
            CommError: as for a collective that blocks.
        """
        ...
