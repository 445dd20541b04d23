"""Gradients that add up over passes, and the band around a step."""

import pytest

from tests.plan import graphs
from tests.predict.machines import FAST, device, machine
from tests.predict.time.test_step_events import predicted
from workbench.plan.machine.device import Sample
from workbench.plan.machine.work import work_of
from workbench.plan.plans.plan import Plan


def backward_s(plan, **fields):
    """Of one rank; one second of the devices' time passes a gigabyte, and computing takes none."""
    slow = device(flops={"fp32": 1e300}, bandwidth=1e9)
    return predicted(plan, machine(slow, within=FAST), **fields).breakdown[0]["backward"]


@pytest.mark.parametrize(("features", "passes"), [((400, 200, 10), 1), ((1100, 1000), 3)])
def test_gradients_of_further_micro_batches_are_added(features, passes):
    """A small layer's are copied into the bucket at first, in two passes, and added in three."""
    graph = graphs.mlp(*features)
    plan, held = Plan.data_parallel(graph, 2), 4 * graph.parameters
    more = backward_s(plan, batch_size=24, accumulate=3) - backward_s(plan, batch_size=8) * 3
    assert more == pytest.approx(2 * passes * held / 1e9, rel=1e-2)


def test_the_band_is_that_of_independent_measurements_or_of_one_guess():
    """Layers that were measured, or of which nothing is known."""
    graph = graphs.mlp(40, 40, 40)
    plan = Plan.data_parallel(graph, 1)
    works = {work_of(plan, layer, 0, (8,), "fp32") for layer in graph.layers}
    samples = tuple(Sample.of(work, 1e-3, 2e-3, 0.12) for work in works)
    known = predicted(plan, machine(device(samples=samples)))
    assert known.estimated == ()
    spent = known.breakdown[0]
    in_layers = (spent["forward"] + spent["backward"]) / known.step_time
    alone = 0.08 + 0.12 * in_layers
    assert 0.08 < known.error < alone * 0.9
    assert predicted(plan).error > 0.9
