"""Batch norm of rows that are spread over ranks, against one over all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from workbench.layers.local.norms import LocalBatchNorm, SynchronizedBatchNorm, read_in_order
from workbench.plan.placement.placement import Shard

ROWS = [(8,), (4, 4), (1, 5, 2), (6, 0, 2)]


def norm():
    torch.manual_seed(1)
    whole = nn.BatchNorm2d(3).double()
    nn.init.normal_(whole.weight)
    nn.init.normal_(whole.bias)
    return whole, 5 + torch.randn(8, 3, 2, 2).double(), torch.randn(8, 3, 2, 2).double()


def spread(world, rows):
    ranks = tuple(range(world.size))
    group = world.groups([("norm", ranks)])["norm", ranks]
    whole, x, dy = norm()
    layer = SynchronizedBatchNorm(whole, group, layer="bn")
    span = Shard(0, rows).span(world.rank)
    mine = x.narrow(0, *span).clone().requires_grad_()
    y = layer(mine)
    y.backward(dy.narrow(0, *span))
    state = {name: t.detach().clone() for name, t in layer.state_dict().items()}
    evaluated = layer.eval()(mine)
    return y.detach(), mine.grad, layer.weight.grad, layer.bias.grad, state, evaluated.detach()


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_synchronized_equals_the_whole_batch(on_ranks, rows):
    whole, x, dy = norm()
    x.requires_grad_()
    y = whole(x)
    y.backward(dy)
    gradients = []
    for rank, got in enumerate(on_ranks(len(rows), spread, rows)):
        span = Shard(0, rows).span(rank)
        assert_close(got[0], y.narrow(0, *span))
        assert_close(got[1], x.grad.narrow(0, *span))
        gradients.append(got[2:4])
        assert_close(got[4], dict(whole.state_dict()))
        assert_close(got[5], whole.eval()(x).narrow(0, *span))
    assert_close(sum(g[0] for g in gradients), whole.weight.grad)
    assert_close(sum(g[1] for g in gradients), whole.bias.grad)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_local_is_torchs_own(momentum, counts):
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(3, momentum=momentum)
    twin = nn.BatchNorm2d(3, momentum=momentum)
    if not counts:
        whole.num_batches_tracked = twin.num_batches_tracked = None
    layer = LocalBatchNorm(twin)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2)
        assert_close(layer(x), whole(x), rtol=0, atol=0)
    assert_close(layer.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert_close(layer.eval()(x), whole.eval()(x), rtol=0, atol=0)


def test_a_rank_without_rows_counts_the_batch_and_keeps_its_statistics():
    layer = LocalBatchNorm(nn.BatchNorm2d(3))
    x = torch.zeros(0, 3, 2, 2, requires_grad=True)
    layer(x).sum().backward()
    assert layer.num_batches_tracked.item() == 1
    assert_close(layer.running_mean, torch.zeros(3))
    assert_close(layer.weight.grad, torch.zeros(3))
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("reads", ["in order", "channels innermost", "turned"])
@pytest.mark.parametrize("gradient", ["in order", "channels innermost", "turned"])
def test_one_row_is_read_however_it_and_its_gradient_lie(norm, reads, gradient):
    """torch itself reads other elements in some of these cases, and says nothing."""
    generator = torch.Generator().manual_seed(0)
    row, given = torch.randn(2, 1, 3, 4, 4, generator=generator)
    statistics = torch.zeros(3), torch.full((3,), 4.0)
    arguments = statistics if norm is F.batch_norm else ()

    def found(x, grad):
        x = x.detach().requires_grad_()
        y = read_in_order(norm, x, *arguments)
        y.backward(grad)
        return y.detach(), x.grad

    expected = found(row, given)
    torch.testing.assert_close(found(lies(row, reads), lies(given, gradient)), expected)


def lies(x, how):
    if how == "channels innermost":
        return x.contiguous(memory_format=torch.channels_last)
    turned = x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, (4, 4))
    return turned if how == "turned" else x
