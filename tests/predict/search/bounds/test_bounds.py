"""No plan is predicted to take less time or memory than the search reckons with."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.search.drawn import convolutions, tokens
from tests.predict.search.machines import machine, machines
from workbench.plan.placement.rounds import RoundsError
from workbench.plan.plans.plan import Plan
from workbench.predict.search.bounds.costs import TIMES
from workbench.predict.search.limit.candidates import Prices, Rule
from workbench.predict.search.limit.memory_costs import MemoryCosts
from workbench.predict.search.question import question_of
from workbench.predict.search.search import PlanSearch

SYNCS = (
    wb.Synchronous(bucket_bytes=64),
    wb.Synchronous(codec="int8"),
    wb.LocalSGD(every=2),
    wb.Pipelined(),
    wb.ParameterServer(),
)
# Gradients of fp16 travel scaled, which only some can tell.
CASES = tuple(
    (precision, sync)
    for precision, sync in itertools.product(("fp32", "bf16", "fp16", "fp64"), SYNCS)
    if precision != "fp16" or sync in (SYNCS[0], SYNCS[-1])
)


def searching(graph, machine, world, **fields):
    given = dict(
        experiment=None,
        batch_size=8,
        optimizer=wb.SGD(lr=0.1, momentum=0.9),
        precision="fp32",
        pin=None,
        group_sizes=None,
        shares=True,
        rounds=True,
        recompute=True,
        seconds=5.0,
    )
    return PlanSearch(question_of(graph, machine, world, 2**40, **(given | fields)), 0.0)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    data=st.data(),
    graph=st.one_of(convolutions(), tokens()),
    machine=machines(),
    case=st.sampled_from(CASES),
    optimizer=st.sampled_from((wb.SGD(lr=0.1), wb.SGD(lr=0.1, momentum=0.9), wb.Adam())),
    batch=st.sampled_from((2, 7, 16)),
    accumulate=st.sampled_from((1, 2)),
)
def test_bounds_are_below(data, graph, machine, case, optimizer, batch, accumulate):
    precision, sync = case
    experiment = wb.Experiment(
        plan=Plan(graph, 2),
        data="digits",
        optimizer=optimizer,
        precision=precision,
        steps=1,
        batch_size=batch,
        accumulate=1 if isinstance(sync, wb.ParameterServer) else accumulate,
        sync=sync,
    )

    def choose(found, able):
        options = found.question.options.items()
        choices = {name: data.draw(st.sampled_from(allowed)) for name, allowed in options}
        return choices, data.draw(st.lists(st.sampled_from(able), unique=True))

    check_bounds(machine, experiment, choose)


def test_rows_fall_into_rounds_otherwise_under_each_scheme():
    """Of one row on each rank, "B/K" has two in its first round, and "B" one in each."""
    graph = graphs.Builder((4, 4, 4)).conv("conv", 4).add("flat", "flatten", (64,)).linear("fc", 6)
    plan, sgd = Plan(graph.graph(), 2), wb.SGD(lr=0.1)
    experiment = wb.Experiment(plan=plan, data="digits", optimizer=sgd, steps=1, batch_size=2)
    quick = machine(latency=1e-8, busy=0.0, slowdown=1.0)
    check_bounds(quick, experiment, lambda found, able: (dict.fromkeys(("conv", "fc"), cut()), []))


def test_gradients_of_what_a_tail_reads_are_not_added_up_before_it():
    builder = graphs.Builder((4, 4, 4)).conv("conv0", 4).conv("conv1", 4)
    builder.same("add", "add", "conv0", "conv1")
    graph = builder.add("flatten", "flatten", (64,)).linear("fc", 6).graph()
    plan, sgd = Plan(graph, 2), wb.SGD(lr=0.1)
    experiment = wb.Experiment(plan=plan, data="digits", optimizer=sgd, steps=1, batch_size=2)
    quick = machine(latency=1e-8, bandwidth=1e10, busy=0.0, slowdown=1.0)
    check_bounds(quick, experiment, lambda found, able: ({"conv1": cut()}, []))


def cut():
    return wb.LayerPlan("shard_out", group_size=2)


def check_bounds(machine, experiment, choose):
    """Holds what a plan is reckoned to take against what is predicted, in all rounds."""
    graph = experiment.plan.graph
    fields = dict(experiment=experiment, batch_size=None, optimizer=None, precision=None)
    found = searching(graph, machine, 2, **fields)
    limited = found.limited(2.0**40, found.evaluator)
    able = [name.name for name, may in zip(graph.layers, limited.recomputable, strict=True) if may]
    choices, again = choose(found, able)
    path = found.trellis.path(choices)
    bound = found.all.found(path)
    for variant in limited.variants:
        plan = Plan(graph, 2, choices)
        plan = plan.with_recompute(*again) if again else plan
        candidate = variant.cheapest(
            Prices(0.0, np.zeros(len(path)), 0.0), rules(found, path, again)
        )[1]
        try:
            plan = plan.with_rounds(variant.rounds)
            assert variant.rounds == "BK" or plan.tail is not None
        except (RoundsError, AssertionError):
            assert candidate is None or variant.rounds != "BK"
            continue
        assert candidate is not None
        prediction = wb.predict(plan, machine, experiment)
        assert max(bound.least_seconds, candidate.seconds) <= prediction.step_time * (1 + 1e-9)
        assert candidate.peak <= prediction.memory.peak_bytes + 1


def rules(found, path, again):
    """By which one plan alone can be chosen."""
    for index, layer in enumerate(found.trellis.layers):
        if layer.name in found.trellis.options:
            choice = int(found.trellis.stages[index].choice[path[index]])
            yield Rule(index, "choice", choice, True)
        yield Rule(index, "recompute", int(layer.name in again and learns(found, layer)), True)


def learns(found, layer):
    return layer.name in found.costs.learns


def test_memory_and_rounds_leave_the_costs_in_time_as_they_are():
    found = searching(graphs.vgg(), machine(), 2, batch_size=64)
    stages = found.trellis.priced(MemoryCosts(found.costs)).stages
    for stage, variant in zip(found.trellis.stages, stages, strict=True):
        assert (variant.costs[:, :TIMES] == stage.costs).all()
        assert variant.costs.shape[1] > TIMES
