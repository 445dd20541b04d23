"""Crossings: the identity of the logical tensor both ways, whatever happens to its pieces."""

import pytest
import torch
from torch.testing import assert_close

from tests.ranks import all_ranks
from workbench.comm.regions import (
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from workbench.plan.placement.placement import Partial, Replicate, Shard

WHOLE, SUMMAND = Replicate(), Partial()


def crossings(sizes):
    """name -> (crossing, placement of x, of y, of y's gradient, of x's gradient)."""
    cut, other = Shard(1, sizes), Shard(0, sizes[::-1])
    again = Shard(1, (*sizes[1:], sizes[0]))
    return {
        "copy_to": (lambda x, g: copy_to(x, g), WHOLE, WHOLE, SUMMAND, WHOLE),
        "gather_from": (lambda x, g: gather_from(x, cut, g), cut, WHOLE, WHOLE, cut),
        "gather_from, partial": (
            lambda x, g: gather_from(x, cut, g, gradient="partial"),
            *(cut, WHOLE, SUMMAND, cut),
        ),
        "reduce_from": (lambda x, g: reduce_from(x, g), SUMMAND, WHOLE, WHOLE, WHOLE),
        "reduce_from, partial": (
            lambda x, g: reduce_from(x, g, gradient="partial"),
            *(SUMMAND, WHOLE, SUMMAND, WHOLE),
        ),
        "scatter_to": (lambda x, g: scatter_to(x, cut, g), WHOLE, cut, cut, WHOLE),
        "reduce_scatter_to": (
            lambda x, g: reduce_scatter_to(x, cut, g),
            *(SUMMAND, cut, cut, WHOLE),
        ),
        "exchange": (lambda x, g: exchange(x, cut, other, g), cut, other, other, cut),
        "exchange, same dim": (lambda x, g: exchange(x, cut, again, g), cut, again, again, cut),
    }


def local(placement, rank, shape, seed):
    """One rank's part of a logical tensor of `shape`."""
    own = rank if placement == SUMMAND else 0
    x = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + own)).double()
    return x.narrow(placement.dim, *placement.span(rank)) if isinstance(placement, Shard) else x


def logical(placement, parts):
    """The tensor that the ranks' parts stand for."""
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    if placement == SUMMAND:
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)  # bitwise, on every rank
    return parts[0]


def inner(x_placement, xs, g_placement, gs):
    """<x, g> of logical tensors: replicated pairs count once, others add up over the ranks."""
    products = [(x * g).sum().item() for x, g in zip(xs, gs, strict=True)]
    return products[0] if x_placement == g_placement == WHOLE else sum(products)


def there_and_back(world, sizes):
    group, answers = all_ranks(world), {}
    shape = (sum(sizes), sum(sizes), 2)
    for name, (crossing, x_at, _, g_at, _) in crossings(sizes).items():
        x = local(x_at, group.rank, shape, seed=1).clone().requires_grad_()
        y = crossing(x, group)
        g = local(g_at, group.rank, shape, seed=2)
        given, grad = x.detach().clone(), g.clone()
        y.backward(g)
        assert torch.equal(x, given), "x was modified"
        assert torch.equal(g, grad), "the gradient was modified"
        assert y.is_contiguous()
        answers[name] = x.detach(), y.detach(), g, x.grad
    return answers


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 4, 2), (5, 0, 1), (0, 0, 4, 0)], ids=str)
def test_crossings_keep_the_logical_tensor_and_its_gradient(on_ranks, sizes):
    answers = on_ranks(len(sizes), there_and_back, sizes)
    for name, (_, x_at, y_at, g_at, dx_at) in crossings(sizes).items():
        xs, ys, gs, dxs = zip(*(answer[name] for answer in answers), strict=True)
        assert_close(logical(y_at, ys), logical(x_at, xs), msg=lambda m, name=name: name + m)
        assert_close(logical(dx_at, dxs), logical(g_at, gs), msg=lambda m, name=name: name + m)
        # <F x, g> = <x, F* g>
        assert inner(y_at, ys, g_at, gs) == pytest.approx(inner(x_at, xs, dx_at, dxs)), name


def residual(world):
    group = all_ranks(world)
    x = torch.ones(2, requires_grad=True)
    y = x + copy_to(x, group)  # autograd hands one gradient tensor to both branches
    y.backward(torch.ones(2))
    z = torch.ones(2, requires_grad=True)
    reduced = reduce_from(z, group, gradient="partial")
    (reduced + reduced.detach()).backward(torch.ones(2))
    return x.grad, z.grad


def test_an_incoming_gradient_is_left_alone(on_ranks):
    for x_grad, z_grad in on_ranks(3, residual):
        assert_close(x_grad, torch.full((2,), 1.0 + 3.0))
        assert_close(z_grad, torch.full((2,), 3.0))


def dtypes(world):
    group, shard, answers = all_ranks(world), Shard(0, (2, 1)), []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(shard.sizes[group.rank], 2, dtype=dtype, requires_grad=True)
        # The gradient of a sum has stride 0.
        y = gather_from(x, shard, group, gradient="partial")
        y.sum().backward()
        answers.append((y.dtype, x.grad.dtype, x.grad.unique().tolist()))
    return answers


def test_the_dtype_is_kept_and_expanded_gradients_are_fine(on_ranks):
    for answers in on_ranks(2, dtypes):
        for y_dtype, grad_dtype, values in answers:
            assert y_dtype == grad_dtype
            assert values == [2.0]


def under_autocast(world):
    group, shard = all_ranks(world), Shard(0, (1, 1))
    x, w = torch.ones(1, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gather_from(x @ w, shard, group)
        z = y @ w
    z.float().sum().backward()
    rows = world.recorder.rows()
    return y.dtype, w.grad.dtype, [(r.op, r.phase, r.bytes) for r in rows]


def test_under_autocast_crossings_carry_what_they_are_given(on_ranks):
    for y_dtype, w_dtype, rows in on_ranks(2, under_autocast):
        assert (y_dtype, w_dtype) == (torch.bfloat16, torch.float32)
        assert rows == [("all_gather", "forward", 4 * 2)]


def in_place(world):
    group, shard = all_ranks(world), Shard(0, (1, 1))
    results = []
    for crossing in (
        lambda x: gather_from(x, shard, group),
        lambda x: reduce_from(x, group),
        lambda x: scatter_to(gather_from(x, shard, group), shard, group),
    ):
        x = torch.full((1, 3), -1.0, requires_grad=True)
        torch.relu_(crossing(x)).sum().backward()
        results.append((x.tolist(), x.grad.tolist()))
    return results


def test_what_comes_out_can_be_worked_on_in_place(on_ranks):
    for answer in on_ranks(2, in_place):
        assert answer == [([[-1.0] * 3], [[0.0] * 3])] * 3
