"""Layouts, the way from one to another, and what it brings to a rank."""

import pytest

from workbench.plan.placement.placement import (
    ROWS,
    Conversion,
    Layout,
    Partial,
    Replicate,
    Shard,
    over,
    route,
    volume,
)

WHOLE, SUMS = Layout(4, Replicate()), Layout(4, Partial())
CUT, ACROSS = Layout(4, Shard(1, (2, 2, 2, 2))), Layout(4, Shard(2, (2, 2, 2, 2)))
PAIRS = Layout(2, Replicate())


def test_a_group_of_one_rank_has_its_own_rows():
    assert over(1, Shard(1, (8,))) is ROWS
    assert over(2, Replicate()) == PAIRS


def test_layouts_read_well():
    assert list(map(str, (ROWS, WHOLE, SUMS))) == ["own rows", "R over 4", "P over 4"]
    assert str(Layout(2, Shard(1, (3, 1)))) == "S(1: 3/1) over 2"


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        (WHOLE, WHOLE, "copy_to"),
        (CUT, CUT, "copy_to"),
        (SUMS, WHOLE, "all_reduce"),
        (SUMS, ROWS, "reduce_scatter_rows"),
        (SUMS, CUT, "reduce_scatter_features"),
        (ROWS, WHOLE, "all_gather_rows"),
        (WHOLE, ROWS, "slice_rows"),
        (CUT, WHOLE, "all_gather_features"),
        (WHOLE, CUT, "slice_features"),
        (CUT, ROWS, "all_to_all"),
        (ROWS, CUT, "all_to_all"),
        (CUT, ACROSS, "all_to_all"),
    ],
)
def test_a_conversion_is_one_collective_of_its_group(source, target, name):
    found = Conversion(source, target, "same", (6,))
    assert (found.name, found.group_size, found.rows) == (name, 4, 1)


def test_the_way_is_one_step_or_over_own_rows():
    assert route(WHOLE, Layout(4, Replicate())) == ()
    assert route(SUMS, CUT) == (CUT,)
    assert route(ROWS, PAIRS) == (PAIRS,)
    assert route(PAIRS, ROWS) == (ROWS,)
    assert route(PAIRS, WHOLE) == (ROWS, WHOLE)


@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        (WHOLE, WHOLE, 0),
        (WHOLE, ROWS, 0),
        (WHOLE, CUT, 0),
        (ROWS, WHOLE, 90),  # the 30 elements of the rows of three others
        (CUT, WHOLE, 90),
        (SUMS, ROWS, 90),
        (SUMS, CUT, 90),
        (SUMS, WHOLE, 180),
        (ROWS, CUT, 22.5),  # a quarter of the rows of three others
        (CUT, ROWS, 22.5),
        (PAIRS, WHOLE, 90),  # slices first
        (Layout(2, Partial()), WHOLE, 30 + 90),
    ],
)
def test_a_rank_receives_of_the_rows_of_others(source, target, elements):
    assert volume(source, target, (5, 6)) == elements
