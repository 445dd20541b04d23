"""Times of some steps tell what is slow, and nothing where it may be chance."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from workbench.predict.balance.online import CONFIDENCE, SURE, Evidence


def drawn(factors, scatter, steps, seed=0):
    rng = np.random.default_rng(seed)
    return (np.array(factors) * np.exp(scatter * rng.normal(size=(steps, len(factors))))).tolist()


def test_of_few_steps_the_interval_is_students():
    steps = [(1.0, 2.0), (1.1, 2.0), (1.3, 2.0)]
    logs = np.log([own[0] for own in steps])
    half = student.ppf((1 + CONFIDENCE) / 2, 2) * logs.std(ddof=1) / math.sqrt(3)
    seen = Evidence(steps)
    assert seen.seconds == pytest.approx((math.exp(logs.mean()), 2.0))
    assert seen.spread(0, [1]) == pytest.approx(math.expm1(half))
    assert seen.spread(1, [0]) == 0.0  # another one's scatter is not its own


def test_one_step_of_many_that_took_long_says_nothing():
    seen = Evidence([(1.0, 1.0)] * 5 + [(50.0, 1.0)])
    assert seen.seconds == pytest.approx((1.0, 1.0))
    assert not seen.is_longer(0, 1, 0.0)


def test_what_disturbs_both_ranks_does_not_hide_that_one_is_slower():
    disturbed = [(1.2 * often, often) for often in (1, 5, 0.3, 2, 9, 1)]
    seen = Evidence(disturbed)
    assert seen.spread(0, []) > 1
    assert seen.spread(0, [1]) == pytest.approx(0.0, abs=1e-9)
    assert seen.is_longer(0, 1, 0.1)
    assert not seen.is_longer(0, 1, 0.2)
    assert not seen.is_longer(1, 0, 0.0)


@pytest.mark.parametrize("steps", [3, 6, 24])
def test_equal_ranks_are_seldom_taken_for_unequal(steps):
    looks = [Evidence(drawn((1, 1), 0.2, steps, seed)).is_longer(0, 1, 0.0) for seed in range(2000)]
    assert sum(looks) <= 3 * (1 - SURE) * len(looks) + 3


def test_a_rank_three_times_slower_is_seen_though_its_steps_scatter():
    seen = [Evidence(drawn((1, 3), 0.3, 12, seed)).is_longer(1, 0, 0.05) for seed in range(50)]
    assert sum(seen) >= 45


def test_a_large_difference_is_plain_at_once_though_steps_scatter():
    before = [drawn((1, 1), 0.2, 21, seed) for seed in range(200)]
    slow = [drawn((1, 3), 0.2, 3, seed + 1000) for seed in range(200)]
    seen = [
        Evidence(own).is_plainly_longer(1, 0, [*old, *own])
        for old, own in zip(before, slow, strict=True)
    ]
    assert sum(seen) >= 150
    assert sum(Evidence(own).is_longer(1, 0, 0.05) for own in slow) <= 50


def test_equal_ranks_are_seldom_plainly_unequal():
    steps = [drawn((1, 1), 0.2, 24, seed) for seed in range(2000)]
    assert sum(Evidence(own[-3:]).is_plainly_longer(0, 1, own) for own in steps) <= 4


def test_what_scatters_is_not_known_after_few_steps():
    steps = [(3.0, 1.0)] * 7
    assert not Evidence(steps[-3:]).is_plainly_longer(0, 1, steps)
    assert Evidence(steps[-3:]).is_plainly_longer(0, 1, [*steps, (3.0, 1.0)])
