"""Partitions against brute force, models against their points, and balancing while it runs."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.predict.balance import Balancer, Point, TimeModel, partition
from workbench.predict.balance.time_model import seconds_of

SECONDS = st.floats(0.01, 50, allow_nan=False).map(lambda s: round(s, 3))


@st.composite
def models(draw):
    sizes = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4, unique=True))
    points = tuple(Point(size, draw(SECONDS)) for size in sizes)
    return TimeModel(points)


def end(sizes, times, overheads=None):
    """Of these sizes, by what each device takes for any of them."""
    seconds = max(own[d] for own, d in zip(times, sizes, strict=True))
    return seconds + (0 if overheads is None else overheads[max(1, sum(d > 0 for d in sizes)) - 1])


def all_sizes(total, limits, least):
    ranges = [range(least, limit + 1) for limit in limits]
    return [sizes for sizes in itertools.product(*ranges) if sum(sizes) == total]


def drawn(rng):
    """(units, models, upper bounds, overheads) of a case that brute force can do."""
    total = rng.randint(1, 12)
    every = [
        TimeModel(
            tuple(
                Point(units, round(rng.uniform(0.01, 50), 3))
                for units in rng.sample(range(1, 15), rng.randint(1, 4))
            ),
        )
        for _ in range(rng.randint(1, 4))
    ]
    most = [rng.choice((None, rng.randint(0, total))) for _ in every]
    overheads = sorted(rng.uniform(0, 20) for _ in every) if rng.random() < 0.5 else None
    return total, every, most, overheads


def test_no_other_sizes_end_earlier():
    """Sec. 6, F3: 500 random cases against all that are possible."""
    rng, refused = random.Random(0), 0
    for _ in range(500):
        total, every, most, overheads = drawn(rng)
        least = rng.randint(0, 1) if overheads is None else 0
        besides = [rng.uniform(0, 20) for _ in every] if rng.random() < 0.5 else None
        limits = [total if m is None else m for m in most]
        possible = all_sizes(total, limits, least)
        if not possible:
            refused += 1
            with pytest.raises(ValueError, match="units"):
                partition(total, every, least=least, most=most, overheads_s=overheads)
            continue
        found = partition(
            total, every, least=least, most=most, overheads_s=overheads, besides_s=besides
        )
        assert found.sizes in possible
        times = seconds_of(every, total) + np.c_[besides or [0.0] * len(every)]
        best = min(end(sizes, times.tolist(), overheads) for sizes in possible)
        assert found.end_s == pytest.approx(best, rel=1e-12)
    assert refused < 100


def test_overheads_do_not_fall():
    with pytest.raises(ValueError, match="2 seconds that do not fall"):
        partition(4, [TimeModel((Point(1, 1.0),))] * 2, overheads_s=(1.0, 0.5))


def test_a_slow_link_leaves_the_fastest_device_alone():
    fast, slow = TimeModel((Point(10, 1.0),)), TimeModel((Point(10, 5.0),))
    assert partition(100, [fast, slow]).sizes == (84, 16)
    assert partition(100, [slow, fast], overheads_s=(0.0, 9.0)).sizes == (0, 100)


@given(st.lists(models(), min_size=1, max_size=4), st.integers(0, 60), st.integers(1, 8))
def test_grains_stay_whole_but_for_one_rest(every, total, grain):
    sizes = partition(total, every, grain=grain).sizes
    assert sum(sizes) == total
    assert sum(size % grain != 0 for size in sizes) <= 1


@given(models())
def test_a_model_passes_through_its_points_where_they_do_not_fall(model):
    times = model.seconds(20)
    assert times[0] == 0
    assert np.all(np.diff(times) >= 0)
    rising = all(a.seconds <= b.seconds for a, b in itertools.pairwise(model.points))
    if rising:
        for point in model.points:
            assert times[point.units] == pytest.approx(point.seconds)


def test_times_are_straight_between_points_whatever_others_were_measured_at():
    rng = random.Random(0)
    every = [
        TimeModel(tuple(Point(d, d * rng.uniform(1, 2)) for d in rng.sample(range(1, 40), n)))
        for n in range(2, 9)
    ]
    for model, row in zip(every, seconds_of(every, 60), strict=True):
        assert np.array_equal(row, model.seconds(60))
        x, y = zip((0, 0.0), *((p.units, p.seconds) for p in model.points), strict=True)
        expected = np.interp(np.arange(61), x, y)
        expected[x[-1] :] = y[-1] / x[-1] * (np.arange(x[-1], 61) - x[-1]) + y[-1]
        assert row == pytest.approx(np.maximum.accumulate(expected))


def test_a_functional_model_is_never_worse_than_a_constant_one():
    """Sec. 6, F1: with a large fixed cost the constant model hands out the wrong sizes."""
    truth = [lambda d, v=v: (0.5 + d / v) * (d > 0) for v in (40.0, 20.0, 10.0)]
    sizes = (8, 16, 32, 64, 128)
    every = [TimeModel(tuple(Point(d, t(d)) for d in sizes)) for t in truth]
    constant = [TimeModel((Point(128, t(128)),)) for t in truth]

    def slowest(chosen):
        return max(t(d) for t, d in zip(truth, chosen, strict=True))

    ends = [slowest(partition(120, m).sizes) for m in (every, constant)] + [slowest((40, 40, 40))]
    assert ends == sorted(ends)
    assert partition(120, every).imbalance <= 0.05


@pytest.mark.parametrize("speeds", [(4, 2, 1), (2, 1, 1), (70, 25, 5)])
def test_balancing_ends_within_five_rounds(speeds):
    """Sec. 6, F2: from equal sizes, and again once a device has slowed down."""
    balancer = Balancer((40, 40, 40), patience=1)

    def times(sizes, speeds):
        return [(0.05 + d / v) * (d > 0) for d, v in zip(sizes, speeds, strict=True)]

    for now in (speeds, (speeds[0] / 2, *speeds[1:])):
        for _ in range(5):
            balancer = balancer.measured(times(balancer.sizes, now))
        last = max(times(balancer.sizes, now))
        best = min(max(times((a, b, 120 - a - b), now)) for a in range(121) for b in range(121 - a))
        assert last <= best * 1.06


def test_one_slow_step_changes_nothing():
    balancer = Balancer((10, 10))
    assert balancer.measured((1.0, 2.0)).measured((1.0, 1.0)) == balancer
    slow = balancer
    for _ in range(3):
        slow = slow.measured((1.0, 3.0))
    assert slow.sizes == (15, 5)


def test_bad_models_are_refused():
    with pytest.raises(ValueError, match="time model"):
        TimeModel(())
    with pytest.raises(ValueError, match="at least one unit"):
        Point(0, 1.0)
