"""Any pieces, any dimension, any dtype, on one to four ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather, all_to_all, reduce_scatter
from workbench.plan.placement.placement import Shard

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"]


@st.composite
def cases(draw, ranks):
    """(shape, source cut, target cut, dtype) of one tensor."""
    sizes = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).map(tuple)
    ndim = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim))
    source = Shard(draw(st.integers(0, ndim - 1)), draw(sizes))
    target = Shard(draw(st.integers(0, ndim - 1)), draw(sizes))
    if target.dim == source.dim:
        target = Shard(source.dim, draw(st.permutations(source.sizes).map(tuple)))
    shape[source.dim], shape[target.dim] = source.extent, target.extent
    return tuple(shape), source, target, draw(st.sampled_from(DTYPES))


def worlds():
    return st.integers(1, 4).flatmap(
        lambda ranks: st.tuples(st.just(ranks), st.lists(cases(ranks), min_size=20, max_size=20))
    )


def check(world, drawn):
    group = all_ranks(world)
    for shape, source, target, dtype in drawn:
        # Small whole numbers, so that every sum is exact in every dtype.
        wholes = [torch.randint(0, 9, shape).to(getattr(torch, dtype)) for _ in group.ranks]
        whole, total = wholes[0], torch.stack(wholes).sum(0, dtype=wholes[0].dtype)
        x = whole.narrow(source.dim, *source.span(group.rank))
        moved = whole.narrow(target.dim, *target.span(group.rank))
        part = total.narrow(source.dim, *source.span(group.rank))
        case = f"{shape} {source} {target} {dtype}"
        assert torch.equal(all_gather(x, source, group), whole), case
        assert torch.equal(all_to_all(x, source, target, group), moved), case
        assert torch.equal(all_to_all(moved, target, source, group), x), case
        assert torch.equal(reduce_scatter(wholes[group.rank], source, group), part), case
        assert torch.equal(all_reduce(wholes[group.rank], group), total), case


@pytest.mark.slow
@settings(max_examples=12, derandomize=True, database=None)
@given(worlds())
def test_collectives_equal_plain_torch(on_either, drawn):
    ranks, cases = drawn
    on_either(ranks, check, cases)
