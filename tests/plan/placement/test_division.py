"""Parts of tensors that lie one after another, in proportion to shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.plan.io.errors import PlanError
from workbench.plan.placement.placement import BLOCK, checked_shares, divide, shared_out

SHARES = st.lists(st.sampled_from([0, 0.5, 1, 1, 3]), min_size=1, max_size=9).filter(any)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), SHARES)
def test_everybody_gets_nearly_its_share(lengths, shares):
    sizes = divide(lengths, shares)
    assert [sum(each) for each in sizes] == lengths
    for rank, held in enumerate(map(sum, zip(*sizes, strict=True))):
        assert abs(held - sum(lengths) * shares[rank] / sum(shares)) <= BLOCK + 1, rank
        assert held == 0 or shares[rank] > 0
    for each in sizes:
        begins = [sum(each[:rank]) for rank, size in enumerate(each) if size]
        assert all(begin % BLOCK == 0 for begin in begins)


def test_parts_are_exact_where_they_can_be():
    assert divide([512, 256], (1, 1, 1)) == [(256, 256, 0), (0, 0, 256)]
    assert divide([512, 256], (3, 0, 1)) == [(512, 0, 0), (64, 0, 192)]


@pytest.mark.parametrize(
    ("lengths", "shares", "sizes"),
    [
        ([64], (1, 1), [(0, 64)]),  # as near to 0 as to 64: the lower one
        ([128, 1], (33, 96), [(64, 64), (0, 1)]),  # 33 is nearer to 64
        ([128, 1], (31, 98), [(0, 128), (0, 1)]),  # 31 is nearer to 0
        ([100, 100], (1, 1), [(100, 0), (0, 100)]),
        ([100, 100], (9, 11), [(100, 0), (0, 100)]),  # 90 is nearer to the end than to 64
        ([100, 100], (3, 5), [(64, 36), (0, 100)]),  # 75 is nearer to 64
        ([10, 10, 100], (1, 2), [(10, 0), (10, 0), (0, 100)]),  # 40 is 20 behind a beginning
    ],
)
def test_a_part_begins_a_multiple_of_a_block_behind_the_beginning_of_a_tensor(
    lengths, shares, sizes
):
    assert divide(lengths, shares) == sizes


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, None),
        ((1, 1), None),
        ((2.5, 2.5), None),
        ((1, 2), (1, 2)),
        ([0, 0.5], (0, 0.5)),
    ],
)
def test_equal_shares_are_none(given, taken):
    assert checked_shares(given, 2) == taken


def test_one_rank_has_no_shares():
    assert checked_shares((3,), 1) is None


@pytest.mark.parametrize(
    "given",
    [
        *((1,), (1, 1, 1), (0, 0), (1, -1), (1, float("inf")), (1, float("nan"))),
        *((1, True), (1, "1"), (1, None), 2, "12"),
    ],
    ids=repr,
)
def test_other_shares_are_refused(given):
    with pytest.raises(PlanError, match="shares must be 2 numbers >= 0, one for each rank"):
        checked_shares(given, 2)


@pytest.mark.parametrize(
    ("count", "shares", "ranks", "rows"),
    [
        (7, None, 3, (3, 2, 2)),
        (8, None, 3, (3, 3, 2)),
        (6, None, 3, (2, 2, 2)),
        (2, None, 3, (1, 1, 0)),
        (0, None, 2, (0, 0)),
        (8, (3, 1), 2, (6, 2)),
        (1, (0, 1), 2, (0, 1)),
    ],
)
def test_rows_are_shared_out(count, shares, ranks, rows):
    assert shared_out(count, shares, ranks) == rows
