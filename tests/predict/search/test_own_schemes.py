"""A search considers a person's own schemes, and its bound holds for them."""

import itertools

import pytest

import workbench as wb
from tests.plan.placement.own import ConvOut, Inside
from tests.plan.placement.test_own_schemes import GRAPH
from workbench.plan.placement.layer_plan import LayerPlan

MACHINE = wb.Machine.preset("cpu-10gbe")
OWN = ConvOut(), Inside()


def every_plan(schemes):
    """All plans of two ranks that can be made of these choices, with their predicted times."""
    options = {"conv": [None, schemes[0]]}
    for name in ("fc", "out"):
        options[name] = [None, "shard_out", "shard_in", "duplicate", schemes[1]]
    for chosen in itertools.product(*options.values()):
        layers = {n: LayerPlan(s, 2) for n, s in zip(options, chosen, strict=True) if s is not None}
        yield wb.Plan(GRAPH, 2, layers)


@pytest.mark.parametrize("batch_size", [4, 4096])
def test_the_bound_holds_for_all_plans_and_the_best_is_found(batch_size):
    found = wb.search(
        GRAPH,
        MACHINE,
        world_size=2,
        batch_size=batch_size,
        schemes=OWN,
        recompute=False,
    )
    experiment = wb.Experiment(
        plan=found.plan,
        data="digits",
        batch_size=batch_size,
        optimizer=wb.SGD(0.01, momentum=0.9),
        steps=1,
    )
    times = [wb.predict(plan, MACHINE, experiment).step_time for plan in every_plan(OWN)]
    assert len(times) == 50
    assert found.bound <= min(times) * (1 + 1e-9)
    assert found.prediction.step_time == pytest.approx(min(times), rel=1e-9)


@pytest.mark.slow
def test_it_is_chosen_where_it_is_the_only_way_that_fits():
    """What each rank holds decides, as far as the search knows: only an own scheme cuts `conv`."""
    pinned = {"conv": LayerPlan(OWN[0], 2)}
    found = wb.search(GRAPH, MACHINE, world_size=2, batch_size=64, pin=pinned)
    assert found.plan.layers["conv"].name == "ConvOut"
    assert "ConvOut/2" in repr(found.plan) + found._repr_html_()
    with pytest.raises(wb.PlanError, match="are always considered"):
        wb.search(GRAPH, MACHINE, world_size=2, schemes=("shard_out",))
    with pytest.raises(wb.PlanError, match="does not extend their base class"):
        wb.search(GRAPH, MACHINE, world_size=2, schemes=(object(),))
