"""Under a limit that binds, bounds hold for every plan that fits, and what is found does fit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.search.bounds.test_bounds import searching
from tests.predict.search.drawn import convolutions
from tests.predict.search.machines import machine, machines
from tests.predict.search.test_search import MOMENTUM, searched, tried
from tests.predict.search.test_search import check as check_found
from workbench.predict.search import MemoryLimitError
from workbench.predict.search.evaluation import Evaluator
from workbench.predict.search.limit.candidates import Prices
from workbench.predict.search.limit.column_generation import BranchAndBound, ColumnGeneration


def searched_under(graph, some, found, limit, **fields):
    """(the search, its evaluator) after it has looked for plans under a limit."""
    search = searching(graph, some, 2, shares=False, **fields)
    evaluator = Evaluator(search.question.experiment, some, limit)
    limited = search.limited(limit, evaluator)
    limited.search(search.worked + 1.0)
    assert limited.least(search.worked + 1.5) <= min(size for _, size in found)
    return limited, evaluator


def check(limited, evaluator, found, limit):
    fitting = [seconds for seconds, size in found if size <= limit]
    assert min(limited.bound, evaluator.seconds) <= min(fitting) * (1 + 1e-9)
    if evaluator.best is not None:
        assert evaluator.best.peak_bytes <= limit
        assert evaluator.seconds >= min(fitting) * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=5)
@given(graph=convolutions(most=1), some=machines(), place=st.floats(0, 1))
def test_of_schemes_and_rounds(graph, some, place):
    found = tried(graph, some, 2)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(*searched_under(graph, some, found, limit, recompute=False), found, limit)
    check_found(graph, some, 2, found, limit, recompute=False)
    check_found(graph, some, 2, found, sizes[0] - 1, recompute=False)


@pytest.mark.slow
@settings(max_examples=2)
@given(some=machines(), place=st.floats(0, 1))
def test_of_layers_computed_again(some, place):
    graph = graphs.mlp(64, 256, 4)
    found = tried(graph, some, 2, batch=512, recompute=True)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(*searched_under(graph, some, found, limit, batch_size=512), found, limit)
    check_found(graph, some, 2, found, limit, batch_size=512)


def test_parts_have_no_lower_bounds_than_the_whole():
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64)
    limited = search.limited(2.0**40, search.evaluator)
    free = next(BranchAndBound(limited.variants, 2.0**40, lambda: np.inf).plans())
    branching = BranchAndBound(limited.variants, 0.9 * free.peak, lambda: np.inf)
    bounds = [branching.bound for _, _ in zip(range(60), branching.plans(), strict=False)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(bounds))
    assert bounds[-1] > 0


def test_the_least_memory_of_all_mixtures_is_found():
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64, rounds=False)
    (variant,) = search.limited(2.0**40, search.evaluator).variants
    columns = ColumnGeneration(variant, None)
    while columns.step() is not None:
        pass
    assert 0 < columns.bound <= min(candidate.peak for candidate in columns.candidates) * (1 + 1e-9)


@pytest.mark.parametrize("lean", [False, True])
def test_a_cheapest_plan_costs_what_it_takes(lean):
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64)
    draw = np.random.default_rng(0)
    for variant in search.limited(2.0**40, search.evaluator).variants:
        moments = draw.random(len(variant.edges)) ** 8 * 1e-8
        prices = Prices(float(draw.random()), moments, 0.0 if lean else 1.0)
        cost, candidate = variant.cheapest(prices)
        cost += prices.time * variant.terms.fixed + prices.total * variant.resident
        seconds = (1 - prices.mix) * candidate.serial_s + prices.mix * candidate.overlapped_s
        assert cost == pytest.approx(prices.time * seconds + candidate.levels @ moments)


def test_a_limit_that_no_plan_meets_is_refused_where_plans_are_many():
    graph, some = graphs.vgg(), machine(bandwidth=1e7)
    with pytest.raises(MemoryLimitError, match="the leanest plan found") as info:
        searched(graph, some, 2, 1024, batch_size=64, time_limit=600.0)
    error = info.value
    experiment = wb.Experiment(
        plan=error.plan, data="digits", optimizer=MOMENTUM, steps=1, batch_size=64
    )
    assert wb.predict(error.plan, some, experiment).memory.peak_bytes == error.needed
    assert 1024 < error.least <= error.needed
