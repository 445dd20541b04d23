"""The algorithms by themselves: any number of ranks, any length, any type."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.lockstep import run
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.algorithms.hierarchical import across
from workbench.comm.messages.flat import cut, even
from workbench.predict.traffic import collective_costs

LENGTHS = st.integers(0, 40)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
PROFILE = settings(max_examples=60, derandomize=True, database=None)


def samples(length, ranks, dtype):
    generator = torch.Generator().manual_seed(100 * length + ranks)
    values = 10 * torch.randn(ranks, length, generator=generator, dtype=torch.float64)
    return list(values.to(dtype))


def check_sums(results, inputs):
    """All ranks have the same bits; the error is that of a few roundings of the type."""
    exact = torch.stack(inputs).double().sum(0)
    assert all(torch.equal(result, results[0]) for result in results)
    assert {result.dtype for result in results} == {inputs[0].dtype}
    size = torch.stack(inputs).double().abs().sum(0)
    eps = torch.finfo(inputs[0].dtype).eps if inputs[0].is_floating_point() else 0
    assert ((results[0].double() - exact).abs() <= len(inputs) * eps * size).all()


@pytest.mark.parametrize("name", FLAT)
@PROFILE
@given(ranks=st.integers(1, 9), length=LENGTHS, dtype=DTYPES)
def test_flat_ones_sum_and_cost_what_the_formulas_say(name, ranks, length, dtype):
    inputs = samples(length, ranks, dtype)
    flats = [x.clone() for x in inputs]
    found = run([FLAT[name].rounds(flat, range(ranks), me) for me, flat in enumerate(flats)])
    check_sums(flats, inputs)
    expected = collective_costs.FLAT[name](length, dtype.itemsize, ranks)
    assert found == [(cost.messages, cost.bytes, cost.rounds) for cost in expected]


@PROFILE
@given(ranks=st.integers(2, 6), length=LENGTHS, dtype=DTYPES)
def test_direct_sums_in_rank_order_and_rounds_once(ranks, length, dtype):
    inputs = samples(length, ranks, dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = torch.zeros(length, dtype=wide)
    for x in inputs:
        expected += x.to(wide)
    run([FLAT["direct"].rounds(flat, range(ranks), me) for me, flat in enumerate(inputs)])
    assert torch.equal(inputs[0], expected.to(dtype))


def counted(rounds, additions):
    """The same rounds, whose additions are noted."""
    for exchange in rounds:
        additions.append(exchange.additions)
        yield exchange


@PROFILE
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    length=LENGTHS,
    dtype=DTYPES,
    shuffled=st.randoms(use_true_random=False),
)
def test_hosts_sum_their_segments_with_each_other(sizes, length, dtype, shuffled):
    """What each host has summed within goes in; ranks lie on hosts in any order."""
    order = list(range(sum(sizes)))
    shuffled.shuffle(order)
    hosts = tuple(tuple(order.pop() for _ in range(size)) for size in sizes)
    inputs = samples(length, len(sizes), dtype)  # one of each host
    wholes = [x.clone() for x in inputs]
    ranks, additions = {}, []
    for whole, members in zip(wholes, hosts, strict=True):
        parts = cut(whole, even(length, len(members)))
        ranks |= {
            rank: counted(across(part, length, hosts, rank), additions)
            for rank, part in zip(members, parts, strict=True)
        }
    found = run([ranks[rank] for rank in sorted(ranks)])
    check_sums(wholes, inputs)
    assert sum(additions) == (len(sizes) - 1 if len(sizes) > 2 else 2) * length
    costs = collective_costs.hierarchical(length, dtype.itemsize, sizes)
    expected = dict(zip(itertools.chain(*hosts), costs.across, strict=True))
    for rank, counts in enumerate(found):
        cost = expected[rank]
        assert counts == (cost.messages, cost.bytes, cost.rounds)
