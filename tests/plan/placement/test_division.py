"""Parts of tensors that lie one after another, in proportion to shares."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.plan.placement.division import BLOCK, divide

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
