"""Cross-entropy over cut classes, against torch's over whole ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from workbench.layers.local.loss import (
    PLAIN,
    cross_entropy_sum,
    cut_cross_entropy_sum,
    highest_class,
    label_weights,
    torch_options,
)
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.placement.placement import Shard

UNLABELLED, WEIGHT = -100, (0.5, 2.0, 0.0, 1.0, 1.0, 3.0, 0.1, 1.0, 1.0, 0.7)
OPTIONS = [
    dict(ignore_index=UNLABELLED),
    dict(ignore_index=0),
    dict(label_smoothing=0.1),
    dict(label_smoothing=1.0),
    dict(weight=WEIGHT),
    dict(weight=WEIGHT, label_smoothing=0.3, ignore_index=UNLABELLED),
]
CUTS = [(10,), (5, 5), (3, 3, 2, 2), (7, 0, 3), (0, 10), (1, 1, 8, 0)]


def batch(rows):
    torch.manual_seed(3)
    logits = 30 * torch.randn(rows, 10, dtype=torch.float64)  # far apart: exponents overflow
    return logits, torch.randint(10, (rows,))


def cut(world, sizes, rows, options=PLAIN):
    ranks = tuple(range(world.size))
    group = world.groups([("shard", ranks)])["shard", ranks]
    logits, labels = batch(rows)
    labels[:1] = UNLABELLED if options.ignore_index == UNLABELLED else 0
    classes = Shard(1, sizes)
    mine = logits.narrow(1, *classes.span(world.rank)).clone().requires_grad_()
    loss = cut_cross_entropy_sum(mine, labels, classes, group, options)
    (2 * loss).backward()
    return loss.item(), mine.grad


def check(on_ranks, sizes, rows, options=PLAIN, **of_torch):
    logits, labels = batch(rows)
    labels[:1] = UNLABELLED if options.ignore_index == UNLABELLED else 0
    logits.requires_grad_()
    loss = F.cross_entropy(logits, labels, reduction="sum", **of_torch)
    (2 * loss).backward()
    whole = cross_entropy_sum(logits.detach(), labels, options)
    assert whole.item() == pytest.approx(loss.item(), rel=1e-12)
    for rank, (got, grad) in enumerate(on_ranks(len(sizes), cut, sizes, rows, options)):
        assert got == pytest.approx(loss.item(), rel=1e-12)
        assert_close(grad, logits.grad.narrow(1, *Shard(1, sizes).span(rank)))


@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_equals_the_whole(on_ranks, sizes, rows):
    check(on_ranks, sizes, rows)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(10,), (3, 3, 2, 2), (7, 0, 3)], ids=str)
def test_options_are_those_of_torch(on_ranks, sizes, given):
    of_torch = dict(given)
    if "weight" in given:
        of_torch["weight"] = torch.tensor(WEIGHT, dtype=torch.float64)
    check(on_ranks, sizes, 6, CrossEntropy(**{"ignore_index": None, **given}), **of_torch)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_labels_count_what_torch_divides_by(given):
    logits, labels = batch(6)
    labels[:1] = UNLABELLED if given.get("ignore_index") == UNLABELLED else 0
    options = CrossEntropy(**{"ignore_index": None, **given})
    total = cross_entropy_sum(logits, labels, options) / label_weights(labels, options).sum()
    mean = F.cross_entropy(logits, labels, **torch_options(options, logits))
    assert total.item() == pytest.approx(mean.item(), rel=1e-12)


def test_scores_of_labels_that_are_ignored_may_be_anything(on_ranks):
    """An infinite loss times nothing would be no number."""
    for got, grad in on_ranks(2, masked):
        assert got == pytest.approx(math.log(4), rel=1e-12)
        assert not grad[0].any()


def masked(world):
    ranks = tuple(range(world.size))
    group = world.groups([("shard", ranks)])["shard", ranks]
    logits = torch.zeros(2, 2, dtype=torch.float64)
    logits[0] = -math.inf if world.rank else 0.0
    mine = logits.requires_grad_()
    options = CrossEntropy(ignore_index=3)
    loss = cut_cross_entropy_sum(mine, torch.tensor([3, 0]), Shard(1, (2, 2)), group, options)
    loss.backward()
    return loss.item(), mine.grad


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
