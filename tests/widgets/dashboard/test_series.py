import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.widgets.dashboard.fake import MIB, row
from workbench.widgets.dashboard.series import Series


def filled(num_steps, *, world_size=1, **options):
    series = Series(world_size, **options)
    for step in range(num_steps):
        series.extend(row(step, rank) for rank in range(world_size))
    return series


def same(left, right):
    return repr(left) == repr(right)  # NaN equals NaN here


def test_a_step_is_shown_once_every_rank_has_reported_it():
    series = Series(2)
    series.extend([row(0, 0), row(1, 0), row(0, 1)])
    assert series.columns["step"] == [0]
    assert series.done == 1


def test_values_are_means_over_the_ranks():
    series = Series(2)
    series.extend([row(0, 0, loss=1.0, samples_per_s=90), row(0, 1, loss=3.0, samples_per_s=110)])
    assert series.columns["loss"] == [2.0]
    assert series.columns["samples_per_s"] == [100.0]


def test_a_step_that_a_rank_never_reports_does_not_hold_up_later_ones():
    series = Series(2)
    series.extend([row(0, 0), row(1, 0), row(1, 1)])
    assert series.columns["step"] == [0, 1]


def test_settling_takes_in_what_is_incomplete():
    series = Series(2)
    series.extend([row(0, 0), row(0, 1), row(1, 0)])
    series.settle()
    assert series.columns["step"] == [0, 1]


def test_a_loss_that_is_no_number_is_a_gap():
    series = Series(1)
    series.extend([row(0, 0), row(1, 0, loss=math.nan), row(2, 0)])
    assert [math.isnan(loss) for loss in series.columns["loss"]] == [False, True, False]


@pytest.mark.parametrize(
    ("num_steps", "stride"), [(7, 1), (8, 2), (15, 2), (16, 4), (1000, 128)], ids=str
)
def test_long_runs_stay_within_the_capacity(num_steps, stride):
    series = filled(num_steps, capacity=8)
    steps = series.columns["step"]
    assert series.stride == stride
    assert len(steps) <= 8
    assert steps == sorted(steps)
    assert steps[-1] == num_steps - 1


def test_merged_points_are_means_and_keep_the_last_accuracy():
    series = Series(1, capacity=4)
    series.extend(
        row(step, 0, loss=loss, accuracy=accuracy)
        for step, loss, accuracy in [
            (0, 1.0, 0.5),
            (1, 3.0, math.nan),
            (2, 5.0, 0.7),
            (3, 7.0, 0.8),
        ]
    )
    assert series.columns["step"] == [1, 3]
    assert series.columns["loss"] == [2.0, 6.0]
    assert series.columns["accuracy"] == [0.5, 0.8]


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from([2, 4, 8]))
def test_what_is_taken_adds_up_to_the_points(batches, capacity):
    """Views see only what `take` gives; they must end with the same points."""
    series, view, step = Series(1, capacity=capacity), [], 0
    for size in batches:
        series.extend(row(step + i, 0) for i in range(size))
        step += size
        start, points = series.take()
        assert start <= len(view)
        view[start:] = points
        assert same(view, series.points)


def test_nothing_new_is_nothing_to_take():
    series = filled(5)
    series.take()
    assert series.take() == (5, [])


def test_an_accuracy_from_outside_belongs_to_the_last_step():
    series = filled(3)
    series.take()
    series.measured(0.97)
    start, points = series.take()
    assert (start, points[-1][-1]) == (2, 0.97)
    series.measured(math.nan)
    assert series.accuracy == 0.97


def test_peaks_are_those_of_the_whole_run_and_seconds_those_of_recent_steps():
    series = Series(1, recent=2)
    series.extend(
        row(step, 0, peak_bytes=peak * MIB, compute_s=seconds)
        for step, peak, seconds in [(0, 900, 9.0), (1, 200, 1.0), (2, 300, 2.0)]
    )
    (rank,) = series.ranks
    assert rank.peak_bytes == 900 * MIB
    assert rank.compute_s == 1.5


def test_a_rank_with_a_gpu_shows_the_gpu():
    series = Series(2)
    series.extend([row(0, 0, gpu_bytes=7 * MIB), row(0, 1)])
    assert series.ranks[0].now_bytes == 7 * MIB
    assert series.ranks[0].on_gpu
    assert not series.ranks[1].on_gpu


def test_a_rank_that_has_not_reported_is_unknown():
    assert math.isnan(Series(1).ranks[0].now_bytes)


def test_times_come_from_the_rows():
    series = filled(31)
    assert series.elapsed_s == pytest.approx(6.0)
    assert series.seconds_per_step == pytest.approx(0.2)
    assert math.isnan(filled(1).seconds_per_step)
