"""Intervals: what is left of a layer's time when collectives are taken out."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.train.trace.trace import (
    Called,
    Computed,
    LayerSeconds,
    RankTrace,
    united,
    without,
)

POINTS = st.integers(0, 20)
INTERVALS = st.lists(st.tuples(POINTS, POINTS).map(sorted).map(tuple), max_size=6)


def moments(intervals):
    """Unit steps of time that intervals cover."""
    return {at for begin, end in intervals for at in range(begin, end)}


@given(INTERVALS)
def test_united_intervals_cover_the_same_moments_apart_and_in_order(intervals):
    found = united(intervals)
    assert moments(found) == moments(intervals)
    ends = [point for interval in found for point in interval]
    assert ends == sorted(ends)


@given(INTERVALS, st.tuples(POINTS, POINTS).map(sorted).map(tuple))
def test_what_is_left_is_all_that_no_other_covers(intervals, whole):
    left = list(without(whole, united(intervals)))
    assert moments(left) == moments([whole]) - moments(intervals)


def test_a_layer_is_what_it_computed_over_all_passes():
    """Two passes; a gather inside the first, a conversion and a bucket on their way."""
    gather = ("all_gather", "b", "forward")
    bucket = ("all_reduce", "gradients", "step")
    trace = RankTrace(
        16.0,
        (
            Computed("forward", "b", (0.0, 4.0)),
            Computed("forward", "b", (4.0, 5.0), conversion="all_gather"),
            Computed("backward", "b", (5.0, 9.0)),
            Computed("forward", "b", (9.0, 10.0)),
            Computed("backward", "b", (10.0, 12.0)),
            Computed("update", "", (12.0, 16.0)),
        ),
        (
            Called("g", 1, *gather, 8, (1.0, 3.0), False, ((1.0, 3.0),), ()),
            Called("g", 2, *bucket, 8, (6.0, 12.5), True, ((12.0, 12.5),), ((6.0, 7.0),)),
        ),
    )
    assert trace.held_up == [(1.0, 3.0), (6.0, 7.0), (12.0, 12.5)]
    assert trace.layer_seconds() == {"b": LayerSeconds(3.0, 5.0)}
    assert trace.own_seconds() == [2.0, 1.0, 3.0, 1.0, 2.0, 3.5]
