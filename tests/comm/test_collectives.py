"""Collectives against plain torch on the gathered inputs."""

import itertools

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather, all_to_all, broadcast, reduce_scatter
from workbench.plan.placement.placement import Shard

CUTS = [
    pytest.param((6,), id="one-rank"),
    pytest.param((3, 3), id="equal"),
    pytest.param((1, 4, 2), id="unequal"),
    pytest.param((5, 0, 1), id="an-idle-rank"),
    pytest.param((0, 0, 4, 0), id="all-idle-but-one"),
    pytest.param((0, 0), id="nothing"),
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def sample(shape, seed, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (100 * values).to(dtype)


def piece(whole, shard, rank):
    return whole.narrow(shard.dim, *shard.span(rank))


def rank_sum(shape, count, dtype):
    """What the ranks' samples sum to, added up in rank order; half types in fp32."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = torch.zeros(shape, dtype=wide)
    for rank in range(count):
        total = total + sample(shape, rank, dtype).to(wide)
    return total.to(dtype)


def same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert torch.equal(got, expected)


def shapes(extent):
    """The cut dimension first, in the middle and last; and beside an empty one."""
    return [(0, (extent, 3)), (1, (2, extent, 3)), (1, (1, extent, 3)), (2, (2, 3, extent)),
            (1, (0, extent))]  # fmt: skip


def gathers_and_scatters(world, sizes):
    group = all_ranks(world)
    for (dim, shape), dtype in itertools.product(shapes(sum(sizes)), DTYPES):
        shard = Shard(dim, sizes)
        whole = sample(shape, 7, dtype)
        # Both a view with gaps and memory of its own must be accepted.
        for x in (piece(whole, shard, group.rank), piece(whole, shard, group.rank).contiguous()):
            before = x.clone()
            same(all_gather(x, shard, group), whole)
            same(x.contiguous(), before)
        x = sample(shape, group.rank, dtype)
        before = x.clone()
        total = rank_sum(shape, group.size, dtype)
        same(reduce_scatter(x, shard, group), piece(total, shard, group.rank).contiguous())
        same(all_reduce(x, group), total)
        same(all_reduce(x.movedim(0, -1), group), total.movedim(0, -1).contiguous())
        root = group.size - 1
        same(broadcast(x, root, group), sample(shape, root, dtype))
        same(x, before)


@pytest.mark.parametrize("sizes", CUTS)
def test_equal_plain_torch(on_either, sizes):
    on_either(len(sizes), gathers_and_scatters, sizes)


def cuts_anew(world, sizes, others):
    group = all_ranks(world)
    for source_dim, target_dim in itertools.product(range(3), range(3)):
        shape = [3, 3, 3]
        shape[source_dim] = sum(sizes)
        if target_dim != source_dim:
            shape[target_dim] = sum(others)
        source, target = Shard(source_dim, sizes), Shard(target_dim, others)
        for dtype in (torch.float32, torch.bfloat16):
            whole = sample(shape, 7, dtype)
            x = piece(whole, source, group.rank)
            before = x.clone()
            got = all_to_all(x, source, target, group)
            same(got, piece(whole, target, group.rank).contiguous())
            same(x.contiguous(), before)


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        pytest.param((6,), (6,), id="one-rank"),
        pytest.param((3, 3), (3, 3), id="the-same"),
        pytest.param((1, 4, 2), (3, 2, 2), id="unequal"),
        pytest.param((5, 0, 1), (0, 6, 0), id="idle-ranks"),
        pytest.param((0, 0, 4, 0), (0, 4, 0, 0), id="all-idle-but-one"),
        pytest.param((0, 0), (0, 0), id="nothing"),
    ],
)
def test_cut_anew_along_the_same_or_another_dimension(on_either, sizes, others):
    on_either(len(sizes), cuts_anew, sizes, others)


def small_shapes(world):
    group = all_ranks(world)
    for shape in [(), (1,), (2,), (5,), (0,), (3, 1)]:
        same(
            all_reduce(sample(shape, group.rank), group), rank_sum(shape, group.size, torch.float32)
        )
    result = all_reduce(torch.ones(3), group)
    result += 1  # out of place: what comes back is the caller's own


@pytest.mark.parametrize("size", [1, 3, 4])
def test_all_reduce_of_fewer_elements_than_ranks(on_either, size):
    on_either(size, small_shapes)


def aliases(world):
    group, shard = all_ranks(world), Shard(0, (3,))
    x = torch.ones(3)
    results = [
        all_gather(x, shard, group),
        reduce_scatter(x, shard, group),
        all_to_all(x, shard, shard, group),
        all_reduce(x, group),
        broadcast(x, 0, group),
    ]
    return [result.data_ptr() == x.data_ptr() for result in results]


def test_a_group_of_one_copies(on_either):
    assert on_either(1, aliases) == [[False] * 5]


def with_gradients(world):
    group, cut = all_ranks(world), Shard(0, (3, 3))
    x = 2 * torch.ones(3, requires_grad=True)
    y = 2 * torch.ones(6, requires_grad=True)
    results = [
        all_gather(x, cut, group),
        reduce_scatter(y, cut, group),
        all_to_all(x, cut, cut, group),
        all_reduce(x, group),
        broadcast(x, 0, group),
    ]
    return [result.requires_grad for result in results]


def test_collectives_are_not_differentiated(on_either):
    assert on_either(2, with_gradients) == [[False] * 5] * 2


def refusals(world):
    group, x = all_ranks(world), torch.ones(2, 3)
    halves = Shard(1, (1, 2))
    wrong = [
        lambda: all_gather(x, Shard(1, (3,)), group),
        lambda: all_gather(x, Shard(1, (1, 1)), group),
        lambda: all_gather(x, Shard(2, (1, 1)), group),
        lambda: reduce_scatter(x, Shard(1, (2, 2)), group),
        lambda: all_to_all(piece(x, halves, group.rank), halves, Shard(0, (1, 2)), group),
        lambda: all_to_all(piece(x, halves, group.rank), halves, Shard(1, (2, 2)), group),
        lambda: broadcast(x, 2, group),
    ]
    messages = []
    for call in wrong:
        with pytest.raises(ValueError, match=r"\d") as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_refuses_what_does_not_fit_and_says_why(on_either):
    messages = on_either(2, refusals)[1]
    group = "<Group world(0,1), rank 1 of 2>"
    assert messages == [
        f"S(1: 3) has 1 sizes, {group} has 2 ranks",
        f"{group} wants 1 elements along dim 1 for S(1: 1/1), got shape (2, 3)",
        f"{group} wants 1 elements along dim 2 for S(2: 1/1), got shape (2, 3)",
        f"{group} wants 4 elements along dim 1 for S(1: 2/2), got shape (2, 3)",
        f"{group} wants 3 elements along dim 0 for S(0: 1/2), got shape (2, 2)",
        f"cannot turn S(1: 1/2) into S(1: 2/2) on {group}",
        f"the root of a broadcast in {group} must be one of 0..1, got 2",
    ]
