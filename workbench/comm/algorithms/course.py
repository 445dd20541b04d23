"""An algorithm on its way: its rounds follow each other as they become possible."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor

from workbench.comm.algorithms.background import Background
from workbench.comm.algorithms.direct import direct
from workbench.comm.algorithms.exchange import Algorithm, Rounds
from workbench.comm.algorithms.halving_doubling import halving_doubling
from workbench.comm.algorithms.progress import Progress
from workbench.comm.algorithms.ring import ring
from workbench.comm.codecs import rounds as coded
from workbench.comm.codecs.coding import Coding
from workbench.comm.groups.group import Call, Link
from workbench.comm.groups.watch import Work
from workbench.comm.transfer import trade

FLAT: Mapping[str, Algorithm] = MappingProxyType(
    {"direct": direct, "ring": ring, "halving_doubling": halving_doubling}
)
"""The algorithms that know no hosts, by name."""
_CODED = MappingProxyType({"direct": coded.direct, "ring": coded.ring})


class RoundExecutor:
    """Runs the rounds of one rank, on the thread that calls `advance` or `wait`.

    The first one starts at once. Several may be under way in a group, also of one call: ranks
    need not advance them in one order.

    Args:
        rounds: from an algorithm.
        call: what they are part of.
        index: tells it from other courses of the same call; the same on all ranks.
    """

    def __init__(self, rounds: Rounds, call: Call, index: int = 0) -> None:
        self._rounds, self._call, self._index = rounds, call, index
        self._under_way: Work | None = None
        self._over = False
        self.advance()

    def advance(self) -> bool:
        """Does what has become possible, and waits for nothing; whether all is done.

        Raises:
            PeerLost: a connection broke.
        """
        link = self._call.group.link
        while not self._over:
            if self._under_way is not None and link is not None:
                if not link.is_done(self._under_way):
                    return False
                link.wait([self._under_way], self._call)  # raises what went wrong
                self._call.mark("reduce")
            exchange = next(self._rounds, None)
            self._over = exchange is None
            self._under_way = None
            if exchange is not None:
                self._call.mark("send", sum(piece.nbytes for _, piece in exchange.sends))
                self._under_way = trade(exchange, self._call, self._index)
                self._call.mark("wait", sum(piece.nbytes for _, piece in exchange.receives))
        return True

    def wait(self) -> None:
        """Returns when all is done.

        Raises:
            CommError: as for a collective that blocks.
        """
        link = self._call.group.link
        while not self.advance():
            if self._under_way is not None and link is not None:
                link.wait([self._under_way], self._call)


def begin(
    name: str, flat: Tensor, link: Link, call: Call, coding: Coding | None = None
) -> Progress:
    """Starts to sum `flat` in place over all ranks of a group.

    Args:
        name: of an algorithm that knows no hosts, or "backend".
        flat: contiguous, where the communicator wants it.
        link: of the group.
        call: what it is part of.
        coding: of the values while they travel; None: they stay as they are.
    """
    if name == "backend":
        return Background(flat, link, call)
    algorithm = FLAT[name] if coding is None else partial(_CODED[name], coding=coding)
    return RoundExecutor(algorithm(flat, range(call.group.size), call.group.rank), call)
