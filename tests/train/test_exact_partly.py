"""Nets that are trained in part, under any plan: what one process computes, as predicted."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.layers import partly
from tests.layers.drawn import plans
from tests.predict import running
from tests.train.exact import Case, check
from workbench.plan.experiment.experiment import SGD, Experiment, Synchronous
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.rounds import ROUNDS, RoundsError
from workbench.plan.plans.plan import Plan
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of

TOGETHER = 16


@st.composite
def cases(draw, world):
    net = draw(st.sampled_from(partly.NETS))
    plan, rows = draw(plans(net, world, partly.GRAPHS))
    try:
        plan = plan.with_rounds(draw(st.sampled_from(ROUNDS)))
    except RoundsError:
        pass
    seeing = [layer.name for layer in plan.graph.layers if layer.rows]
    plan = plan.with_recompute(*draw(st.lists(st.sampled_from(seeing), max_size=4)))
    return Case(net, plan, (rows, apportion(draw(st.integers(1, 9)), (1,) * world)))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(
    max_examples=2,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_any_case_is_what_one_process_computes(on_ranks, world, data):
    drawn = st.lists(cases(world), min_size=TOGETHER, max_size=TOGETHER, unique=True)
    check(on_ranks, data.draw(drawn))


def received(world, runs):
    """What the record holds of a step of each run."""
    found = []
    for run, net in runs:
        world.recorder.reset()
        found.append(running.received_in_a_step(world, run, net)[0])
    return found


def experiment(plan):
    sync = Synchronous(bucket_bytes=600)
    given = dict(optimizer=SGD(lr=0.1), batch_size=7, precision="fp64", sync=sync, steps=1)
    return Experiment(plan=plan, data="digits", **given)


def check_traffic(on_ranks, runs):
    """Predicted calls, messages and bytes are those of the record, row by row."""
    size = runs[0][0].plan.world_size
    predicted = [traffic_of(program_of(run)) for run, _ in runs]
    for rank, recorded in enumerate(on_ranks(size, received, runs)):
        for (run, net), traffic, rows in zip(runs, predicted, recorded, strict=True):
            off = (
                Counter(rows) - Counter(traffic.rows(rank)),
                Counter(traffic.rows(rank)) - Counter(rows),
            )
            assert not any(off), (Case(net, run.plan, ()), off)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(
    max_examples=1,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_predicted_traffic_is_the_recorded(on_ranks, world, data):
    drawn = st.lists(cases(world), min_size=TOGETHER, max_size=TOGETHER, unique=True)
    check_traffic(on_ranks, [(experiment(case.plan), case.net) for case in data.draw(drawn)])


def some_plans():
    """Two for each net: all that can be cut is, with nothing for rank 1; and all is recomputed."""
    for net in partly.NETS:
        graph = partly.GRAPHS[net]
        whole = Plan.data_parallel(graph, 2).with_batch_norm("synchronized")
        cut = Plan.filters(graph, 2, (3, 0), grain=1).with_rows(None)
        yield net, cut.with_batch_norm("synchronized")
        yield net, whole.with_recompute("*")


@pytest.mark.slow
def test_every_net_under_two_plans(on_ranks):
    check(on_ranks, [Case(net, plan, ((3, 2), (0, 1))) for net, plan in some_plans()])


@pytest.mark.slow
def test_traffic_of_every_net_under_two_plans(on_ranks):
    check_traffic(on_ranks, [(experiment(plan), net) for net, plan in some_plans()])
