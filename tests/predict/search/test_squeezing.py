"""Under a limit that binds, bounds hold for every plan that fits, and what is found does fit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan import graphs
from tests.predict.search.drawn import convolutions
from tests.predict.search.machines import machine, machines
from tests.predict.search.test_bounds import searching
from tests.predict.search.test_search import tried
from workbench.predict.search.branching import Branching
from workbench.predict.search.columns import Columns
from workbench.predict.search.judge import Judge


def squeezed(graph, some, found, limit, **fields):
    """(the search, its judge) after it has looked for plans under a limit."""
    search = searching(graph, some, 2, shares=False, **fields)
    judge = Judge(search.question.experiment, some, limit)
    squeezing = search.squeezing(limit, judge)
    squeezing.search(search.worked + 1.0)
    assert squeezing.least(search.worked + 1.5) <= min(size for _, size in found)
    return squeezing, judge


def check(squeezing, judge, found, limit):
    fitting = [seconds for seconds, size in found if size <= limit]
    assert min(squeezing.bound, judge.seconds) <= min(fitting) * (1 + 1e-9)
    if judge.best is not None:
        assert judge.best.peak_bytes <= limit
        assert judge.seconds >= min(fitting) * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(graph=convolutions(most=1), some=machines(), place=st.floats(0, 1))
def test_of_schemes_and_rounds(graph, some, place):
    found = tried(graph, some, 2)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(*squeezed(graph, some, found, limit, recompute=False), found, limit)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(some=machines(), place=st.floats(0, 1))
def test_of_layers_computed_again(some, place):
    graph = graphs.mlp(64, 256, 4)
    found = tried(graph, some, 2, batch=512, recompute=True)
    sizes = sorted(size for _, size in found)
    limit = sizes[int(place * (len(sizes) - 1))]
    check(*squeezed(graph, some, found, limit, batch_size=512), found, limit)


def test_parts_have_no_lower_bounds_than_the_whole():
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64)
    squeezing = search.squeezing(2.0**40, search.judge)
    free = next(Branching(squeezing.every, 2.0**40, lambda: np.inf).plans())
    branching = Branching(squeezing.every, 0.9 * free.peak, lambda: np.inf)
    bounds = [branching.bound for _, _ in zip(range(60), branching.plans(), strict=False)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(bounds))
    assert bounds[-1] > 0


def test_the_least_memory_of_all_mixtures_is_found():
    search = searching(graphs.vgg(), machine(bandwidth=1e7), 2, batch_size=64, rounds=False)
    (laden,) = search.squeezing(2.0**40, search.judge).every
    columns = Columns(laden, None)
    while columns.step() is not None:
        pass
    assert 0 < columns.bound <= min(load.peak for load in columns.loads) * (1 + 1e-9)
