"""Under a limit that binds, bounds hold for every plan that fits, and what is found does fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.search.drawn import convolutions
from tests.predict.search.machines import machine, machines
from tests.predict.search.test_bounds import searching
from tests.predict.search.test_search import MOMENTUM, searched, tried
from tests.predict.search.test_search import check as check_found
from workbench.predict.search import MemoryLimitError
from workbench.predict.search.evaluation import Evaluator


def check(graph, some, found, limit, **fields):
    search = searching(graph, some, 2, shares=False, **fields)
    evaluator = Evaluator(search.question.experiment, some, limit)
    bound = search._limited.search(limit, evaluator)
    assert search._limited.least <= min(size for _, size in found)
    fitting = [seconds for seconds, size in found if size <= limit]
    assert bound <= min(fitting) * (1 + 1e-9)
    if evaluator.best is not None:
        assert evaluator.best.peak_bytes <= limit
        assert evaluator.seconds >= min(fitting) * (1 - 1e-9)
    check_found(graph, some, 2, found, limit, **fields)


@pytest.mark.slow
@settings(max_examples=5)
@given(graph=convolutions(most=1), some=machines(), place=st.floats(0, 1))
def test_of_schemes(graph, some, place):
    found = tried(graph, some, 2)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(graph, some, found, limit, recompute=False)
    check_found(graph, some, 2, found, sizes[0] - 1, recompute=False)


@pytest.mark.slow
@settings(max_examples=2)
@given(some=machines(), place=st.floats(0, 1))
def test_of_layers_computed_again(some, place):
    graph = graphs.mlp(64, 256, 4)
    found = tried(graph, some, 2, batch=512, recompute=True)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(graph, some, found, limit, batch_size=512)


def test_a_cheapest_plan_costs_what_it_takes_and_mixtures_lie_between():
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64)
    limited = search._limited
    peak = limited._peak(len(limited.able) // 2, limited.able)
    free = peak.cheapest(0.0)
    lean = peak.cheapest(1.0, 0.0)
    limit = (free.bytes + lean.bytes) / 2
    meeting = peak.meet(limit)
    assert lean.bytes <= meeting.fits.bytes <= limit < meeting.over.bytes <= free.bytes
    assert meeting.over.seconds <= meeting.bound <= meeting.fits.seconds
    costs = {one.seconds + meeting.price * one.bytes for one in (meeting.fits, meeting.over)}
    assert max(costs) == pytest.approx(min(costs), rel=1e-3)
    mixed = peak.mixed(meeting, limit)
    assert meeting.fits.bytes <= mixed.bytes <= limit
    assert meeting.over.seconds <= mixed.seconds <= meeting.fits.seconds


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
