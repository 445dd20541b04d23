"""The formulas where everything divides, and what holds where nothing does.

That the algorithms move what the formulas say is tested where the algorithms are.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.predict.traffic.collective_costs import FLAT, Cost, hierarchical

PROFILE = settings(max_examples=60, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("name", "messages", "rounds"),
    [("direct", 14, 2), ("ring", 14, 14), ("halving_doubling", 6, 6)],
)
def test_eight_equal_segments(name, messages, rounds):
    assert set(FLAT[name](800, 4, 8)) == {Cost(messages, 2 * 700 * 4, rounds)}


def test_surplus_ranks_are_folded_in():
    two, one, surplus = FLAT["halving_doubling"](600, 2, 3)
    assert (two, one) == (Cost(3, 600 * 2 * 2, 4), Cost(2, 600 * 2, 2))
    assert surplus == Cost(1, 600 * 2, 2)


@pytest.mark.parametrize("name", FLAT)
def test_one_rank_communicates_nothing(name):
    assert list(FLAT[name](10, 4, 1)) == [Cost()]


@PROFILE
@given(length=st.integers(0, 1000), ranks=st.integers(1, 20))
def test_what_all_ranks_receive_is_twice_what_must_be(length, ranks):
    """Every element reaches one rank from k-1 others, and goes back to as many."""
    for formula in FLAT.values():
        assert sum(cost.bytes for cost in formula(length, 1, ranks)) == 2 * (ranks - 1) * length


def test_hosts_of_two():
    costs = hierarchical(400, 4, (2, 2))
    assert set(costs.within) == {Cost(2, 400 * 4, 2)}
    assert set(costs.across) == {Cost(1, 200 * 4, 1)}
    assert set(costs.both) == {Cost(3, 600 * 4, 3)}


def test_hosts_of_any_number_and_size():
    costs = hierarchical(600, 1, (3, 2, 1))
    assert costs.within.bytes.tolist() == [800] * 3 + [600] * 2 + [0]
    assert sum(costs.across.bytes) == 2 * 2 * 600
    # Stripes of 200, 100, 100 and 200 elements, each cut in three.
    assert costs.across.messages.tolist() == [4, 8, 4, 8, 8, 16]
    assert set(costs.across.rounds) == {2}
