"""Batch norm of which each rank, or each group of ranks, normalizes its own rows."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.plan.graphs import mlp
from workbench.plan.plans.plan import Plan
from workbench.train.verify.whole_model import PartedBatchNorm

GRAPH = mlp(3, 2)
THREE = Plan.data_parallel(GRAPH, 3, (2, 0, 1))
X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1


def norm(**fields):
    made = nn.BatchNorm1d(3, dtype=torch.float64, **fields)
    if made.affine:
        nn.init.uniform_(made.weight, 0.5, 2.0)
        nn.init.uniform_(made.bias)
    return made


def apart(x, sizes, **fields):
    """Each part through a norm of its own; and (share, norm) of each part."""
    made = [(len(part) / len(x), norm(**fields)) for part in x.split(sizes)]
    outputs = []
    for part, (_, one) in zip(x.split(sizes), made, strict=True):
        if one.affine:
            nn.init.ones_(one.weight)
            nn.init.zeros_(one.bias)
        outputs.append(one(part))
    return torch.cat(outputs), made


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_each_rank_normalizes_its_rows_and_statistics_are_weighted_by_them(momentum):
    whole = norm(momentum=momentum, affine=False)
    parted = PartedBatchNorm(whole, THREE, 1, 1)
    expected, made = apart(X, [4, 2], momentum=momentum, affine=False)
    assert_close(parted(X), expected)
    for name in ("running_mean", "running_var"):
        assert_close(getattr(parted, name), sum(share * getattr(one, name) for share, one in made))
    assert parted.num_batches_tracked == 1
    assert parted.running_mean is whole.running_mean


def test_groups_normalize_the_rows_of_their_ranks():
    plan = Plan.data_parallel(GRAPH, 4, (1, 2, 0, 3))
    expected, _ = apart(X, [3, 3], affine=False)
    assert_close(PartedBatchNorm(norm(affine=False), plan, 2, 1)(X), expected)
    expected, _ = apart(X, [6], affine=False)
    assert_close(PartedBatchNorm(norm(affine=False), plan, 4, 1)(X), expected)


def test_a_sample_may_have_several_rows():
    x = torch.cat([X, X + 1])  # 12 rows of 6 samples
    expected, _ = apart(x, [8, 4], affine=False)
    assert_close(PartedBatchNorm(norm(affine=False), THREE, 1, 2)(x), expected)


def test_in_evaluation_all_rows_are_normalized_by_the_statistics():
    whole = norm()
    whole.running_mean.uniform_()
    whole.running_var.uniform_(0.5, 2.0)
    parted = PartedBatchNorm(whole.eval(), THREE, 1, 1)
    assert_close(parted(X), whole(X))
    assert parted.num_batches_tracked == 0


def test_without_statistics_rows_are_always_normalized_apart():
    expected, _ = apart(X, [4, 2], affine=False)
    for training in (True, False):
        whole = norm(affine=False, track_running_stats=False).train(training)
        parted = PartedBatchNorm(whole, THREE, 1, 1)
        assert_close(parted(X), expected)
        assert parted.running_mean is None
