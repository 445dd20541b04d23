"""Gathers that are under way beside other work."""

import pytest
import torch
from torch.testing import assert_close

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce
from workbench.comm.nonblocking import start_all_gather, take_gathered
from workbench.plan.placement.placement import Shard


def gathered(world, cuts):
    group = all_ranks(world)
    pieces = [torch.full((rows[world.rank], 3), 1.0 + world.rank) for rows in cuts]
    gradients = [(x, kind) for kind in ("replicate", "partial") for x in pieces]
    pending = [
        start_all_gather(x, Shard(0, rows), group, layer="l")
        for x, rows in zip(2 * pieces, 2 * cuts, strict=True)
    ]
    between = all_reduce(torch.ones(2), group)  # others may pass
    results = []
    for (x, gradient), started in zip(gradients, pending, strict=True):
        mine = x.clone().requires_grad_()
        whole = take_gathered(mine, started, gradient)
        (whole * (1.0 + world.rank)).sum().backward()
        results.append((whole.detach(), mine.grad))
    rows = [r for r in world.recorder.rows() if r.layer == "l" and r.phase == "forward"]
    return between, results, [(r.op, r.calls, r.messages, r.bytes) for r in rows]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_is_an_all_gather_and_its_dual(on_ranks, size):
    cuts = [(2, 1, 3, 2)[:size], (0, 5, 0, 0)[:size], (0,) * size]
    summed = float(sum(range(1, size + 1)))
    for rank, (between, results, record) in enumerate(on_ranks(size, gathered, cuts)):
        assert between.tolist() == [size, size]
        for index, (whole, grad) in enumerate(results):
            rows = cuts[index % len(cuts)]
            expected = [torch.full((n, 3), 1.0 + r) for r, n in enumerate(rows)]
            assert_close(whole, torch.cat(expected))
            factor = 1.0 + rank if index < len(cuts) else summed
            assert_close(grad, torch.full((rows[rank], 3), factor))
        others = [(r, n) for rows in 2 * cuts for r, n in enumerate(rows) if n and r != rank]
        received = sum(n for _, n in others) * 3 * 4
        assert record == [("all_gather", 2 * len(cuts), len(others), received)]
