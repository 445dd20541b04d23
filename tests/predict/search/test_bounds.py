"""No plan is predicted to take less time or memory than the search reckons with."""

from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.predict.search.drawn import convolutions, tokens
from tests.predict.search.machines import machines
from workbench.plan.plan import Plan
from workbench.plan.tail import RoundsError
from workbench.predict.search.question import asked
from workbench.predict.search.searching import Searching

SYNCS = (
    wb.Synchronous(bucket_bytes=64),
    wb.Synchronous(codec="int8"),
    wb.LocalSGD(every=2),
    wb.Pipelined(),
    wb.ParameterServer(),
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
    )
    return Searching(asked(graph, machine, world, 2**40, **(given | fields)), 0.0)


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    graph=st.one_of(convolutions(), tokens()),
    machine=machines(),
    precision=st.sampled_from(("fp32", "bf16", "fp64")),
    optimizer=st.sampled_from((wb.SGD(lr=0.1), wb.SGD(lr=0.1, momentum=0.9), wb.Adam())),
    batch=st.sampled_from((2, 7, 16)),
    accumulate=st.sampled_from((1, 2)),
    sync=st.sampled_from(SYNCS),
)
def test_bounds_are_below(data, graph, machine, precision, optimizer, batch, accumulate, sync):
    plan = Plan(graph, 2)
    experiment = wb.Experiment(
        plan=plan,
        optimizer=optimizer,
        precision=precision,
        steps=1,
        batch_size=batch,
        accumulate=1 if isinstance(sync, wb.ParameterServer) else accumulate,
        sync=sync,
    )
    fields = dict(experiment=experiment, batch_size=None, optimizer=None, precision=None)
    found = searching(graph, machine, 2, **fields)
    choices = {
        name: data.draw(st.sampled_from(options))
        for name, options in found.question.options.items()
    }
    path = found.trellis.path(choices)
    bound = found.all.found(path, 0.0, 0.0)
    plans = [Plan(graph, 2, choices)]
    try:
        if plans[0].tail:
            plans += [plans[0].with_rounds("B"), plans[0].with_rounds("B/K")]
    except RoundsError:
        pass
    for plan in plans:
        prediction = wb.predict(plan, machine, experiment)
        assert bound.least_seconds <= prediction.step_time * (1 + 1e-9)
        assert bound.memory <= prediction.memory.peak_bytes + 1
