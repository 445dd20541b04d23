"""Messages find their way by what they belong to, in whatever order ranks come to them."""

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.algorithms.executor import start_exchange
from workbench.comm.messages.flat import MessageRound


def crossed(world, calls, indices):
    """Rank 0 sends 0, 1, ... in turn; rank 1 waits for the last first."""
    group = all_ranks(world)
    begun = [group.call("all_reduce", "", "step") for _ in range(max(calls) + 1)]
    ways = [(begun[call], index) for call, index in zip(calls, indices, strict=True)]
    pieces = [torch.full((3,), -1.0 if world.rank else float(place)) for place in range(len(ways))]
    works = []
    for place in range(len(ways)) if world.rank == 0 else reversed(range(len(ways))):
        message = ((1 - world.rank, pieces[place]),)
        exchange = (
            MessageRound(sends=message) if world.rank == 0 else MessageRound(receives=message)
        )
        works.append(start_exchange(exchange, *ways[place]))
    group.link.wait(works, begun[0])
    return [piece.tolist() for piece in pieces]


@pytest.mark.parametrize(
    ("calls", "indices"), [((0, 0, 0), (0, 1, 2)), ((0, 1, 2), (0, 0, 0)), ((0, 1, 1), (1, 0, 1))]
)
def test_what_is_under_way_together_is_told_apart(on_ranks, calls, indices):
    found = on_ranks(2, crossed, calls, indices)
    assert found == [[[0.0] * 3, [1.0] * 3, [2.0] * 3]] * 2
