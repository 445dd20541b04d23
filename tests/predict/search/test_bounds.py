"""No plan is predicted to take less time or memory than the search reckons with."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.search.drawn import convolutions, tokens
from tests.predict.search.machines import machine, machines
from workbench.plan.plans.plan import Plan
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


def cut():
    return wb.LayerPlan("shard_out", group_size=2)


def test_gradients_of_several_readers_are_added_up():
    builder = graphs.Builder((4, 4, 4)).conv("conv0", 4).conv("conv1", 4)
    builder.same("add", "add", "conv0", "conv1")
    graph = builder.add("flatten", "flatten", (64,)).linear("fc", 6).graph()
    plan, sgd = Plan(graph, 2), wb.SGD(lr=0.1)
    experiment = wb.Experiment(plan=plan, data="digits", optimizer=sgd, steps=1, batch_size=2)
    quick = machine(latency=1e-8, bandwidth=1e10, busy=0.0, slowdown=1.0)
    check_bounds(quick, experiment, lambda found, able: ({"conv1": cut()}, []))


def check_bounds(machine, experiment, choose):
    """Holds what a plan is reckoned to take against what is predicted."""
    graph = experiment.plan.graph
    fields = dict(experiment=experiment, batch_size=None, optimizer=None, precision=None)
    found = searching(graph, machine, 2, **fields)
    limited = found._limited
    able = [layer.name for layer, may in zip(graph.layers, limited.able, strict=True) if may]
    choices, again = choose(found, able)
    plan = Plan(graph, 2, choices)
    prediction = wb.predict(plan.with_recompute(*again) if again else plan, machine, experiment)
    bound = found.all.found(found.trellis.path(choices))
    peak = limited._peak(len(graph.layers) - 1, limited.able)
    candidate = candidate_of(found, peak, choices, again)
    reckoned = max(bound.least_seconds, candidate.seconds)
    assert reckoned <= prediction.step_time * (1 + 1e-9)
    assert peak.highest(candidate)[1] <= prediction.memory.peak_bytes + 1


def candidate_of(found, peak, choices, again):
    """A plan as one path of the trellis whose states tell what is recomputed."""
    state, path = 0, []
    for layer, one, place in zip(
        found.trellis.layers, peak.stages, found.trellis.path(choices), strict=True
    ):
        recomputes = float(layer.name in again and layer.name in found.costs.learns)
        edges = (one.stage.source == state) & (one.stage.place == place)
        (edge,) = (edges & (one.recomputes == recomputes)).nonzero()[0]
        path.append(int(edge))
        state = int(one.stage.target[edge])
    return peak._of(path)
