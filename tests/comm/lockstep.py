"""Runs all ranks of an algorithm in one process: messages are copies, in order for each pair."""

from collections import defaultdict, deque
from collections.abc import Sequence

from workbench.comm.messages.flat import MessageRound, MessageRounds


def run(
    ranks: Sequence[MessageRounds], pairs: dict[tuple[int, int], int] | None = None
) -> list[tuple[int, int, int]]:
    """Runs every rank to its end.

    Args:
        ranks: what each does.
        pairs: is given the bytes that went, by (receiver, sender).

    Returns:
        Of each rank: messages that it received, their bytes, and its rounds.
    """
    wires = defaultdict(deque)
    current: list[MessageRound | None] = [None] * len(ranks)
    found = [[0, 0, 0] for _ in ranks]
    over: set[int] = set()

    def begin(rank: int) -> None:
        exchange = next(ranks[rank], None)
        current[rank] = exchange
        if exchange is None:
            over.add(rank)
            return
        found[rank][2] += 1
        for other, piece in exchange.sends:
            assert piece.is_contiguous()
            assert other != rank
            if len(piece):
                wires[rank, other].append(piece.clone())

    def is_complete(rank: int) -> bool:
        wanted = [other for other, piece in current[rank].receives if len(piece)]
        return all(len(wires[other, rank]) >= wanted.count(other) for other in wanted)

    for rank in range(len(ranks)):
        begin(rank)
    while len(over) < len(ranks):
        ready = [rank for rank in range(len(ranks)) if rank not in over and is_complete(rank)]
        assert ready, "all ranks wait for each other"
        for rank in ready:
            for other, piece in current[rank].receives:
                if len(piece):
                    piece.copy_(wires[other, rank].popleft())
                    found[rank][0] += 1
                    found[rank][1] += piece.nbytes
                    if pairs is not None:
                        pairs[rank, other] = pairs.get((rank, other), 0) + piece.nbytes
            begin(rank)
    assert not any(wires.values()), "something was sent that nobody wanted"
    return [tuple(counts) for counts in found]
