"""Near-equal parts of tensors that lie one after another."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.plan.division import BLOCK, divide


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(1, 9))
def test_everybody_gets_near_as_much(lengths, count):
    sizes = divide(lengths, count)
    assert [sum(each) for each in sizes] == lengths
    for rank, held in enumerate(map(sum, zip(*sizes, strict=True))):
        assert abs(held - sum(lengths) / count) <= BLOCK + 1, rank
    for each in sizes:
        begins = [sum(each[:rank]) for rank, size in enumerate(each) if size]
        assert all(begin % BLOCK == 0 for begin in begins)


def test_equal_parts_are_exact():
    assert divide([512, 256], 3) == [(256, 256, 0), (0, 0, 256)]
