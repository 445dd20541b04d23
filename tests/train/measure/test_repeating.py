"""Repeating until sure: the estimate, and that all ranks stop together."""

import time

import numpy as np
import pytest

from tests.ranks import all_ranks
from workbench.train.measure.repeating import Repetition, Until, estimate, typical


def test_slow_moments_are_left_out():
    values = np.ones((20, 2))
    values[[3, 11], 0] = 50.0
    mean, half = estimate(values)
    assert mean == pytest.approx([1.0, 1.0])
    assert half == pytest.approx([0.0, 0.0])


def test_the_interval_holds_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(10.0, 2.0, (12, 4000))
    mean, half = estimate(draws)
    assert np.mean(np.abs(mean - 10.0) < half) == pytest.approx(0.95, abs=0.02)


def test_the_typical_value_is_the_estimate():
    values = [3.0, 1.0, 1.5, 40.0, 2.0, 2.5]
    assert typical(values) == estimate(np.array(values))[0] == pytest.approx(2.25)
    assert typical([7.0]) == 7.0


def test_of_few_repetitions_the_odd_one_is_left_out():
    assert estimate(np.array([1.0, 9.0, 1.2]))[0] == pytest.approx(1.2)
    assert estimate(np.array([1.0, 9.0, 1.2, 1.4]))[0] == pytest.approx(1.3)


def test_the_interval_shrinks_with_repetitions():
    draws = np.random.default_rng(0).normal(10.0, 2.0, (400, 100))
    few, many = (estimate(draws[:n])[1].mean() for n in (10, 400))
    assert few > 5 * many


def repetitions(world, noise, within_s, most):
    """How often this rank repeats something that takes `noise[rank]` more or less each time."""
    draws = np.random.default_rng(world.rank)
    values, until = [], Until(relative=0.05, least=6, most=most)
    repetition = Repetition(all_ranks(world), until, within_s)
    while repetition.goes_on(values):
        values.append(np.array([1.0 + noise[world.rank] * draws.standard_normal()]))
    return len(values)


def test_ranks_stop_together_once_all_are_sure(on_ranks):
    assert on_ranks(2, repetitions, (0.0, 0.0), 60.0, 500) == [6, 6]
    counts = on_ranks(2, repetitions, (0.0, 0.5), 60.0, 500)
    assert counts[0] == counts[1] > 6


def test_ranks_stop_when_time_is_up_or_it_was_often_enough(on_ranks):
    began = time.perf_counter()
    counts = on_ranks(2, repetitions, (0.0, 5.0), 0.0, 500)
    assert counts == [2, 2]
    assert time.perf_counter() - began < 10.0
    assert on_ranks(2, repetitions, (5.0, 5.0), 60.0, 9) == [9, 9]
