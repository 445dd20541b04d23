import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.plan.placement.placement import Partial, Replicate, Shard, apportion


def test_spans_follow_one_another():
    shard = Shard(0, (1, 0, 4))
    assert [shard.span(rank) for rank in range(3)] == [(0, 1), (1, 0), (1, 4)]
    assert shard.extent == 5
    assert [Shard(0, (2, 3, 1)).span(rank) for rank in range(3)] == [(0, 2), (2, 3), (5, 1)]


def test_every_block_is_cut_alike():
    shard = Shard(0, (1, 0, 2), blocks=3)
    assert shard.extent == 9
    assert shard.spans(0) == ((0, 1), (3, 1), (6, 1))
    assert shard.spans(2) == ((1, 2), (4, 2), (7, 2))
    assert [shard.length(rank) for rank in range(3)] == [3, 0, 6]
    assert shard.scaled(4) == Shard(0, (4, 0, 8), blocks=3)
    assert str(shard) == "S(0: 1/0/2 of 3 blocks)"
    with pytest.raises(ValueError, match="blocks must be >= 1, got 0"):
        Shard(0, (1,), blocks=0)


@pytest.mark.parametrize("sizes", [(), (2, -1)])
def test_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="non-negative"):
        Shard(0, sizes)


def test_a_negative_dim_is_refused():
    with pytest.raises(ValueError, match="dim counts from the front"):
        Shard(-1, (1, 1))


def test_equal_remainders_go_to_the_first():
    assert apportion(10, (1, 1, 1, 1)) == (3, 3, 2, 2)


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (0, (1, 2), (0, 0)),
        (7, (2, 0, 1), (5, 0, 2)),  # 4.67 and 2.33
        (7, (1, 0, 2), (2, 0, 5)),
        (4, (1, 1, 1, 3), (1, 1, 0, 2)),  # three times 0.67
        (3, (0.5, 0.25, 0.25), (1, 1, 1)),  # 1.5, 0.75 and 0.75
        (1, (0, 1, 1), (0, 1, 0)),
    ],
)
def test_the_largest_remainders_get_one_more(total, shares, sizes):
    assert apportion(total, shares) == sizes


def test_placements_read_well():
    assert list(map(str, (Replicate(), Partial(), Shard(2, (3, 4))))) == ["R", "P", "S(2: 3/4)"]


@pytest.mark.parametrize(
    ("total", "shares"), [(4, ()), (4, (0, 0)), (4, (1, -1)), (4, (float("nan"),)), (-1, (1,))]
)
def test_impossible_shares(total, shares):
    with pytest.raises(ValueError, match=r"shares|hand out"):
        apportion(total, shares)


def test_infinite_shares_are_refused():
    with pytest.raises(ValueError, match="shares must be non-negative"):
        apportion(4, (float("inf"), 1.0))


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda s: sum(s) > 1e-6),
)
def test_every_element_is_handed_out_near_its_share(total, shares):
    sizes = apportion(total, shares)
    assert sum(sizes) == total
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - total * share / sum(shares)) < 1 + 1e-6 * total
        assert size == 0 or share > 0
