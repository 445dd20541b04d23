"""Cross-entropy over cut classes, against torch's over whole ones."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from workbench.layers.loss import cross_entropy_sum, cut_cross_entropy_sum, highest_class
from workbench.plan.placement.placement import Shard

CUTS = [(10,), (5, 5), (3, 3, 2, 2), (7, 0, 3), (0, 10), (1, 1, 8, 0)]


def batch(rows):
    torch.manual_seed(3)
    logits = 30 * torch.randn(rows, 10, dtype=torch.float64)  # far apart: exponents overflow
    return logits, torch.randint(10, (rows,))


def cut(world, sizes, rows):
    ranks = tuple(range(world.size))
    group = world.groups([("shard", ranks)])["shard", ranks]
    logits, labels = batch(rows)
    classes = Shard(1, sizes)
    mine = logits.narrow(1, *classes.span(world.rank)).clone().requires_grad_()
    loss = cut_cross_entropy_sum(mine, labels, classes, group)
    (2 * loss).backward()
    return loss.item(), mine.grad


@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_equals_the_whole(on_ranks, sizes, rows):
    logits, labels = batch(rows)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    (2 * loss).backward()
    for rank, (got, grad) in enumerate(on_ranks(len(sizes), cut, sizes, rows)):
        assert got == pytest.approx(loss.item(), rel=1e-12)
        assert_close(grad, logits.grad.narrow(1, *Shard(1, sizes).span(rank)))


def test_no_rows_lose_nothing():
    logits = torch.zeros(0, 4, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.shape == (0, 4)


def test_half_precision_is_summed_in_single():
    logits = torch.randn(6, 4).bfloat16()
    assert cross_entropy_sum(logits, torch.zeros(6, dtype=torch.int64)).dtype == torch.float32


def best(world, sizes):
    ranks = tuple(range(world.size))
    group = world.groups([("shard", ranks)])["shard", ranks]
    logits, _ = batch(6)
    logits = logits.round(decimals=-1)  # several of a row are equal
    classes = Shard(1, sizes)
    return highest_class(logits.narrow(1, *classes.span(world.rank)), classes, group)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_the_highest_class_is_that_of_the_whole(on_ranks, sizes):
    logits = batch(6)[0].round(decimals=-1)
    for found in on_ranks(len(sizes), best, sizes):
        assert found.tolist() == logits.argmax(1).tolist()
