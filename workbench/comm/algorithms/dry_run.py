"""All ranks of an all-reduce in one process: what they send each other is delivered, and counted.

A message is delivered once both of its ranks are in the round that it belongs to, so that what
runs here needs no room that a network may not have. What does not fit together is refused by the
name of the ranks.
"""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.comm.messages.flat import Message, MessageRound, MessageRounds
from workbench.plan.collective.algorithm import DryRun, Longest
from workbench.plan.extension.user_object import OwnObjectError

# An algorithm of more rounds on one rank is taken to be one that does not end.
MOST_ROUNDS = 2**17


def drive(
    rounds: Sequence[MessageRounds],
    flats: Sequence[Tensor],
    what: str,
    coded: Sequence[Sequence[int]] = (),
) -> DryRun:
    """Runs every rank to its end.

    Args:
        flats: what each rank sums, whose memory is not counted.
        coded: for each rank, the values that it encodes and decodes, and how often; read at the
            end.

    Returns:
        What was exchanged.

    Raises:
        OwnObjectError: ranks wait for each other, send what nobody receives, or pieces that do
            not fit; or a rank goes on without end.
    """
    driver = _Driver(rounds, flats, what)
    driver.run()
    ranks = driver.ranks
    found = coded or [(0, 0, 0)] * len(ranks)
    encoded, decoded, pieces = zip(*found, strict=True)
    return DryRun(
        tuple(rank.messages for rank in ranks),
        tuple(sum(rank.received) for rank in ranks),
        tuple(rank.rounds for rank in ranks),
        tuple(rank.additions for rank in ranks),
        tuple(tuple(rank.received) for rank in ranks),
        tuple(rank.memory.most for rank in ranks),
        encoded,
        decoded,
        pieces,
        Longest(*(max(rank.clock[place] for rank in ranks) for place in range(3))),
    )


class _Rank:
    """One rank: what it exchanged so far, and the round that it is in.

    Attributes:
        sends: what is left to send in this round, by receiver.
        receives: what is left to receive in this round, by sender.
        clock: the longest chains up to this round: rounds, bytes, additions.
        end: the same at the end of this round, as far as messages have ended.
        cost: what a message of this round takes: rounds, bytes.
    """

    def __init__(self, rounds: MessageRounds, flat: Tensor, ranks: int) -> None:
        self.left, self.memory = rounds, _Memory(flat)
        self.messages = self.rounds = self.additions = 0
        self.received = [0] * ranks
        self.sends: dict[int, deque[Tensor]] = {}
        self.receives: dict[int, deque[Tensor]] = {}
        self.waiting, self.then_added, self.over = 0, 0, False
        self.clock, self.end, self.cost = [0, 0, 0], [0, 0, 0], (0, 0)

    def post(self, exchange: MessageRound) -> None:
        """Begins a round."""
        self.sends, self.receives = _by_rank(exchange.sends), _by_rank(exchange.receives)
        self.waiting = sum(map(len, (*self.sends.values(), *self.receives.values())))
        out, into = (
            sum(piece.nbytes for _, piece in way) for way in (exchange.sends, exchange.receives)
        )
        self.cost, self.end = (1, max(out, into)), list(self.clock)
        self.rounds += 1
        self.additions += exchange.additions
        self.then_added = exchange.additions
        self.memory.note([piece for _, piece in (*exchange.sends, *exchange.receives)])

    def conclude(self) -> None:
        """Ends a round, all of whose messages have ended."""
        self.clock = self.end
        self.clock[2] += self.then_added


class _Driver:
    def __init__(self, rounds: Sequence[MessageRounds], flats: Sequence[Tensor], what: str) -> None:
        count = len(rounds)
        self.ranks = [_Rank(own, flat, count) for own, flat in zip(rounds, flats, strict=True)]
        self._what = what
        self._ready = deque(range(count))

    def run(self) -> None:
        while self._ready:
            self._go_on(self._ready.popleft())
        stuck = [number for number, rank in enumerate(self.ranks) if not rank.over]
        if stuck:
            raise self._fault("; ".join(map(self._waits_for, stuck[:4])))

    def _go_on(self, number: int) -> None:
        rank = self.ranks[number]
        exchange = next(rank.left, None)
        if exchange is None:
            rank.over = True
            return
        if not isinstance(exchange, MessageRound):
            raise self._fault(f"rank {number} yields {exchange!r}, which is no MessageRound")
        if rank.rounds == MOST_ROUNDS:
            raise self._fault(f"rank {number} has not ended after {MOST_ROUNDS:,} rounds")
        self._check(number, exchange)
        rank.post(exchange)
        if rank.waiting == 0:
            self._conclude(number)
        for other in rank.sends:
            self._deliver(number, other)
        for other in rank.receives:
            self._deliver(other, number)

    def _conclude(self, number: int) -> None:
        self.ranks[number].conclude()
        self._ready.append(number)

    def _deliver(self, source: int, target: int) -> None:
        """Delivers what both are ready for."""
        sender, receiver = self.ranks[source], self.ranks[target]
        sent, awaited = sender.sends.get(target), receiver.receives.get(source)
        if not (sent and awaited):
            return
        begin = [max(a, b) for a, b in zip(sender.clock, receiver.clock, strict=True)]
        cost = *(max(a, b) for a, b in zip(sender.cost, receiver.cost, strict=True)), 0
        end = [b + c for b, c in zip(begin, cost, strict=True)]
        while sent and awaited:
            piece, room = sent.popleft(), awaited.popleft()
            if len(piece) != len(room) or piece.dtype != room.dtype:
                raise self._fault(
                    f"rank {source} sends rank {target} {_said(piece)}, which receives "
                    f"{_said(room)}"
                )
            room.copy_(piece)
            receiver.messages += 1
            receiver.received[source] += room.nbytes
            sender.waiting -= 1
            receiver.waiting -= 1
        for number, rank in ((source, sender), (target, receiver)):
            rank.end = [max(a, b) for a, b in zip(rank.end, end, strict=True)]
            if rank.waiting == 0:
                self._conclude(number)

    def _check(self, number: int, exchange: MessageRound) -> None:
        for way, messages in (("sends", exchange.sends), ("receives from", exchange.receives)):
            for other, piece in messages:
                if other not in range(len(self.ranks)) or other == number:
                    raise self._fault(
                        f"rank {number} {way} rank {other}, and its others are the rest of ranks "
                        f"0 to {len(self.ranks) - 1}"
                    )
                if piece.ndim != 1 or not piece.is_contiguous():
                    raise self._fault(
                        f"rank {number} {way} rank {other} a piece of shape {tuple(piece.shape)} "
                        f"and stride {piece.stride()}: pieces are flat and contiguous"
                    )
        if _overlaps(exchange):
            raise self._fault(
                f"rank {number} receives, in round {self.ranks[number].rounds + 1}, into memory "
                "that it sends or receives at the same time"
            )

    def _waits_for(self, number: int) -> str:
        rank = self.ranks[number]
        said = [
            f"{doing} rank {other}{', which has ended' if self.ranks[other].over else ''}"
            for doing, way in (("to send to", rank.sends), ("for", rank.receives))
            for other, left in way.items()
            if left
        ]
        return f"rank {number} waits in round {rank.rounds} " + " and ".join(said[:3])

    def _fault(self, said: str) -> OwnObjectError:
        return OwnObjectError(f"{self._what}: {said}")


class _Memory:
    """The memory of the messages of one rank, but for what it sums.

    Attributes:
        most: the most bytes that were there at the same time.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = _memory_of(flat)
        self._there: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def note(self, pieces: Sequence[Tensor]) -> None:
        """Looks at the messages of a round."""
        new = False
        for piece in pieces:
            memory = _memory_of(piece)
            known = self._there.get(memory)
            if memory != self._flat and (known is None or known() is None):
                self._there[memory] = weakref.ref(piece.untyped_storage())
                new = True
        if new:
            found = {memory: storage() for memory, storage in self._there.items()}
            for memory in [memory for memory, storage in found.items() if storage is None]:
                del self._there[memory]
            self.most = max(self.most, sum(s.nbytes() for s in found.values() if s is not None))


def _by_rank(messages: Sequence[Message]) -> dict[int, deque[Tensor]]:
    found: dict[int, deque[Tensor]] = {}
    for other, piece in messages:
        if len(piece):
            found.setdefault(other, deque()).append(piece)
    return found


def _memory_of(piece: Tensor) -> int:
    """The identity of a tensor's memory, also of one without any."""
    found: int = piece.untyped_storage()._cdata
    return found


def _overlaps(exchange: MessageRound) -> bool:
    """Whether something is received into what is sent or received too."""
    spans = sorted(
        (_memory_of(piece), int(start), int(start) + piece.nbytes, received)
        for received, messages in enumerate((exchange.sends, exchange.receives))
        for _, piece in messages
        if len(piece)
        for start in (piece.storage_offset() * piece.itemsize,)
    )
    memory, ends = 0, [0, 0]  # of what is sent, and of what is received
    for own, start, end, received in spans:
        if own != memory:
            memory, ends = own, [0, 0]
        if start < ends[1] or (received and start < ends[0]):
            return True
        ends[received] = max(ends[received], end)
    return False


def _said(piece: Tensor) -> str:
    return f"{len(piece)} elements of {str(piece.dtype).removeprefix('torch.')}"
