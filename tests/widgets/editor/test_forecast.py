"""What the table shows adds up to what is predicted."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.widgets.editor.kit import MACHINE, residual
from workbench.widgets.editor.forecast import figures_of

PLANS = [
    wb.Plan.data_parallel(graphs.vgg(), 4),
    wb.Plan.hybrid(graphs.vgg(), 4, 2),
    wb.Plan.filters(graphs.vgg(), 4, (3, 1, 1, 1)),
    wb.Plan.hybrid(graphs.transformer(), 2),
    wb.Plan.data_parallel(residual(3), 3).with_batch_norm("synchronized"),
]


def predicted(plan, machine=MACHINE):
    optimizer = wb.SGD(lr=0.1, momentum=0.9)
    experiment = wb.Experiment(
        plan=plan, data="digits", optimizer=optimizer, steps=1, batch_size=24
    )
    return wb.predict(plan, machine, experiment)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_layers_add_up_to_the_rank(plan, rank):
    prediction = predicted(plan)
    found = figures_of(prediction, rank)
    assert len(found.layers["memory"]) == len(plan.graph.layers)
    memory = prediction.memory[found.rank]
    assert rank in (None, found.rank)
    if rank is None:
        assert memory.peak_bytes == prediction.memory.peak_bytes
    names = {layer.name for layer in plan.graph.layers}
    own = sum(size for (_, owner), size in memory.held.items() if owner in names)
    assert sum(found.layers["memory"]) == pytest.approx(own, rel=1e-3)
    received = sum(
        c.bytes[found.rank]
        for c in prediction.traffic.collectives
        if c.layer in {*names, "gradients"}
    )
    shown = sum(found.layers["moved"]) + sum(found.layers["summed"])
    assert shown == pytest.approx(received, rel=1e-3)


def test_conversions_are_told_by_direction():
    plan = wb.Plan.hybrid(graphs.vgg(), 4)
    found = figures_of(predicted(plan), 0).layers
    place = [layer.name for layer in plan.graph.layers].index("avgpool")
    # 16 features of the 18 rows that the other three ranks have.
    assert found["forward"][place] == found["backward"][place] == 4 * 16 * 18
    assert found["moved"][place] == 2 * 4 * 16 * 18


def test_ranks_and_their_limits():
    plan = wb.Plan.data_parallel(graphs.vgg(), 4).with_rows((3, 1, 1, 1))
    found = figures_of(predicted(plan), None)
    assert found.rank == 0
    for rank in found.ranks:
        assert sum(rank["parts"].values()) == rank["peak"]
        assert rank["limit"] == MACHINE.device(0).memory_bytes
    assert found.totals.peak_bytes == found.ranks[0]["peak"] > found.ranks[1]["peak"]
    assert sum(found.step.values()) == pytest.approx(found.totals.step_s)


def test_without_a_machine_there_are_no_times():
    found = figures_of(predicted(wb.Plan.hybrid(graphs.vgg(), 4), None), None, limit=2**20)
    assert found.totals.step_s is None
    assert found.totals.samples_per_s is None
    assert set(found.layers["work_s"]) == {0}
    assert found.step == {}
    assert {rank["limit"] for rank in found.ranks} == {2**20}


def test_of_many_ranks_some_are_shown():
    plan = wb.Plan.data_parallel(graphs.vgg(), 24)
    found = figures_of(predicted(plan.with_world_size(96)), 80)
    assert [rank["rank"] for rank in found.ranks] == [*range(64), 80]
