"""All-reduces under way: our algorithms round by round, torch's own on threads of its own."""

import torch.distributed as dist
from torch import Tensor

from workbench.comm.algorithms.flat import algorithm_of
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.groups.group import GroupCall, GroupLink
from workbench.comm.messages.flat import AsyncOperation, MessageRound, MessageRounds
from workbench.comm.messages.waiting import AsyncWork
from workbench.plan.extension.user_object import Own


class BackendAllReduce:
    """Torch's own all-reduce: gloo or nccl sum `flat` in place, and go on by themselves.

    They do not tell what they send: two rounds of near-equal segments are recorded, which is what
    both move where bandwidth counts, though in more messages; in a trace, all is "wait".

    Args:
        flat: the summand [elements], contiguous, on the communicator's device, of a type to sum
            in.
    """

    def __init__(self, flat: Tensor, link: GroupLink, call: GroupCall) -> None:
        group = call.group
        call.count_two_rounds(len(flat), flat.itemsize, range(group.size))
        call.mark("send")
        work = dist.all_reduce(flat, group=link.process_group, async_op=True)
        self._link, self._call = link, call
        call.mark("wait")
        self._work: AsyncWork | None = link.begin(work)

    def advance(self) -> bool:
        """Returns whether it is done."""
        if self._work is not None and self._link.is_done(self._work):
            self.wait()
        return self._work is None

    def wait(self) -> None:
        """Returns when it is done.

        Raises:
            CommError: other ranks did not come.
        """
        if self._work is not None:
            self._link.wait([self._work], self._call)
            self._work = None


# Messages of so many executors of one call have tags of their own.
MOST_AT_ONCE = 1024


class RoundExecutor:
    """Runs the rounds of one rank, on the thread that calls `advance` or `wait`.

    The first round starts at once. Several executors may be under way in a group, also of one
    call: ranks need not advance them in one order.

    Args:
        index: the number that tells this executor from others of the same call; the same on all
            ranks, and below MOST_AT_ONCE.
    """

    def __init__(self, rounds: MessageRounds, call: GroupCall, index: int = 0) -> None:
        self._rounds, self._call, self._index = rounds, call, index
        self._under_way: AsyncWork | None = None
        self._over = False
        self.advance()

    def advance(self) -> bool:
        """Does what has become possible without waiting; returns whether all is done.

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
                self._under_way = start_exchange(exchange, self._call, self._index)
                self._call.mark("wait", sum(piece.nbytes for _, piece in exchange.receives))
        return True

    def wait(self) -> None:
        """Returns when all is done.

        Raises:
            CommError: other ranks did not come.
        """
        link = self._call.group.link
        while not self.advance():
            if self._under_way is not None and link is not None:
                link.wait([self._under_way], self._call)


def begin(
    name: str | Own,
    flat: Tensor,
    link: GroupLink,
    call: GroupCall,
    coding: PieceCoding | None = None,
) -> AsyncOperation:
    """Starts to sum `flat` in place over all ranks of a group.

    Args:
        flat: the summand [elements], contiguous, on the communicator's device.
        coding: what encodes values while they travel; None: they stay as they are.
    """
    if name == "backend":
        return BackendAllReduce(flat, link, call)
    algorithm, members, me = algorithm_of(name), range(call.group.size), call.group.rank
    if coding is None:
        return RoundExecutor(algorithm.rounds(flat, members, me), call)
    return RoundExecutor(algorithm.coded_rounds(flat, members, me, coding), call)


def start_exchange(exchange: MessageRound, call: GroupCall, index: int) -> AsyncWork | None:
    """Starts one round of an algorithm; returns None if this rank has nothing to do in it.

    Args:
        index: the number that tells apart what goes on side by side in one call; below
            MOST_AT_ONCE.
    """
    link = call.group.link
    call.count_round(
        [(rank, piece.nbytes) for rank, piece in exchange.receives], exchange.additions
    )
    # Nobody mistakes a message of one executor for that of another under way, in whatever order
    # ranks come to them; nccl, which knows no tags, is given them in one order.
    tag = (call.number * MOST_AT_ONCE + index) % 2**31
    sends = [(rank, piece) for rank, piece in exchange.sends if len(piece) > 0]
    receives = [(rank, piece) for rank, piece in exchange.receives if len(piece) > 0]
    if link is None or not (sends or receives):
        return None
    return link.send_and_receive(sends, receives, tag)
