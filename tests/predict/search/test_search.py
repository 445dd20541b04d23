"""Search finds what trying every plan finds, and refuses what cannot be asked."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.search.drawn import convolutions, tokens
from tests.predict.search.machines import machine, machines
from workbench.plan.choice import LayerPlan
from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.plan import Plan
from workbench.plan.tail import RoundsError
from workbench.predict.search import MemoryLimitError, search
from workbench.predict.search.choices import options_of

MOMENTUM = wb.SGD(lr=0.1, momentum=0.9)


def in_rounds(plan):
    yield plan
    try:
        if plan.tail:
            yield plan.with_rounds("B")
            yield plan.with_rounds("B/K")
    except RoundsError:
        pass


def subsets(names):
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def every_plan(graph, world, recompute=False, options=None):
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    options = options or options_of(graph, world, sizes, {}, {})
    again = [layer.name for layer in graph.layers if layer.rows] if recompute else []
    for choices in product(*options.values()):
        plan = Plan(graph, world, dict(zip(options, choices, strict=True)))
        for names in subsets(again):
            yield from in_rounds(plan.with_recompute(*names) if names else plan)


def tried(graph, some, world, batch=8, **how):
    """(seconds, bytes) of every plan."""
    experiment = wb.Experiment(
        plan=Plan(graph, world), optimizer=MOMENTUM, steps=1, batch_size=batch
    )
    found = []
    for plan in every_plan(graph, world, **how):
        prediction = wb.predict(plan, some, experiment)
        found.append((prediction.step_time, prediction.memory.peak_bytes))
    return found


def searched(graph, some, world, limit=None, **fields):
    given = dict(optimizer=MOMENTUM, batch_size=8, shares=False)
    return search(graph, some, world, limit, **(given | fields))


def check(graph, some, world, found, limit, **fields):
    fitting = [seconds for seconds, size in found if size <= limit]
    if not fitting:
        with pytest.raises(MemoryLimitError):
            searched(graph, some, world, limit, **fields)
        return
    result = searched(graph, some, world, limit, **fields)
    assert result.step_time == pytest.approx(min(fitting), rel=1e-9)
    assert result.gap == 0
    assert result.prediction.memory.peak_bytes <= limit


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(graph=st.one_of(convolutions(most=2), tokens()), some=machines())
def test_it_equals_brute_force(graph, some):
    found = tried(graph, some, 2)
    check(graph, some, 2, found, 2**34)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(graph=convolutions(most=1), some=machines(), place=st.floats(0, 1))
def test_it_equals_brute_force_under_a_limit(graph, some, place):
    found = tried(graph, some, 2)
    sizes = sorted(size for _, size in found)
    check(graph, some, 2, found, sizes[int(place * (len(sizes) - 1))], recompute=False)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(some=machines(), place=st.floats(0, 1))
def test_it_equals_brute_force_with_layers_computed_again(some, place):
    graph = graphs.mlp(64, 256, 4)
    found = tried(graph, some, 2, batch=512, recompute=True)
    sizes = sorted(size for _, size in found)
    check(graph, some, 2, found, sizes[int(place * (len(sizes) - 1))], batch_size=512)


def test_groups_of_several_sizes():
    graph, some = graphs.mlp(64, 96, 32), machine(4)
    check(graph, some, 4, tried(graph, some, 4, batch=64), 2**34, batch_size=64)
