"""One order of arguments: plan or graph, machine, experiment, and all else by name."""

import inspect

import pytest

import workbench as wb
from tests.plan import graphs
from workbench.plan.experiment.question import experiment_of, required_plan, usual
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.plans.plan import Plan

GRAPH = graphs.mlp(8, 16, 5)
PLAN = Plan.hybrid(GRAPH, 2)
MACHINE = wb.Machine.preset("h100-nvlink")
GIVEN = wb.Experiment(plan=PLAN, data="digits", batch_size=12, optimizer="sgd", steps=1)
ASKERS = [wb.predict, wb.search, wb.balanced, wb.program]


@pytest.mark.parametrize("asker", ASKERS, ids=lambda asker: asker.__name__)
def test_the_order_is_the_same(asker):
    names = list(inspect.signature(asker).parameters)
    assert names[0] in ("plan", "graph")
    assert names[1:3] == ["machine", "experiment"]
    rest = list(inspect.signature(asker).parameters.values())[3:]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in rest)


@pytest.mark.parametrize("asker", ASKERS, ids=lambda asker: asker.__name__)
def test_what_is_missing_is_said(asker):
    name = asker.__name__
    with pytest.raises(PlanError, match=f"{name} needs a (Graph|Plan).* got None"):
        asker(None, MACHINE)
    with pytest.raises(MachineError, match=rf"{name} needs a Machine.* got \(?'h100"):
        asker(PLAN, "h100-nvlink")
    with pytest.raises(ExperimentError, match=f"{name}: experiment must be an Experiment"):
        asker(PLAN, MACHINE, 12)
    with pytest.raises(ExperimentError, match=f"{name} takes one Experiment, got two"):
        asker(GIVEN, MACHINE, GIVEN)


def test_a_missing_machine_is_said():
    for asker in (wb.search, wb.balanced):
        with pytest.raises(MachineError, match=r"calibrate\(\) measures one.* got None"):
            asker(PLAN, None)


def test_an_experiment_stands_for_its_plan():
    assert wb.predict(GIVEN, MACHINE) == wb.predict(PLAN, MACHINE, GIVEN)
    assert wb.search(GIVEN, MACHINE).plan == wb.search(GRAPH, MACHINE, GIVEN).plan
    assert wb.balanced(GIVEN, MACHINE).plan == wb.balanced(PLAN, MACHINE, GIVEN).plan


def test_without_an_experiment_a_usual_step_is_meant():
    assert wb.predict(PLAN, MACHINE).experiment == usual(PLAN)
    assert usual(PLAN).batch_size == 64
    some = wb.predict(PLAN, MACHINE, batch_size=10, optimizer="adam", precision="bf16")
    assert some.experiment == usual(PLAN).replace(
        batch_size=10, optimizer=wb.Adam(), precision="bf16"
    )
    assert wb.predict(PLAN, None, GIVEN, batch_size=20).experiment == GIVEN.replace(batch_size=20)
    wide = Plan.data_parallel(GRAPH, 1024)
    assert wb.predict(wide, MACHINE).memory.peak_bytes > 0


@pytest.mark.parametrize(("ranks", "samples"), [(1, 1024), (32, 1024), (33, 1056)])
def test_a_usual_step_is_one_of_sgd_with_32_samples_for_each_rank(ranks, samples):
    plan = Plan.data_parallel(GRAPH, ranks)
    assert usual(plan) == wb.Experiment(
        plan=plan,
        data=wb.Synthetic(samples=samples, classes=10),
        batch_size=32 * ranks,
        optimizer=wb.SGD(lr=0.01, momentum=0.9),
        steps=1,
    )


def test_an_experiment_of_this_plan_is_taken_as_it_is():
    assert experiment_of("it", PLAN, PLAN, GIVEN) is GIVEN
    assert experiment_of("it", GIVEN, PLAN, None) is GIVEN
    other = Plan.data_parallel(GRAPH, 2)
    assert experiment_of("it", other, other, GIVEN) == GIVEN.replace(plan=other)
    assert experiment_of("it", PLAN, PLAN, GIVEN, batch_size=20).batch_size == 20


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "got None"), (3, "got 3"), (0.5, "got 0.5"), ("a", "got 'a'"), ([1], "of type list")],
)
def test_what_is_given_instead_is_said(given, said):
    with pytest.raises(PlanError, match=said):
        required_plan("it", given)


def test_the_ranks_of_a_search():
    with pytest.raises(PlanError, match=r"needs a number of ranks: search\(graph, machine, world"):
        wb.search(GRAPH, MACHINE)
    assert wb.search(PLAN, MACHINE).plan.world_size == 2
    assert wb.search(PLAN, MACHINE, world_size=4).plan.world_size == 4
    several = MACHINE.replace(devices=MACHINE.devices * 3)
    assert wb.search(GRAPH, several).plan.world_size == 3


def test_a_search_keeps_the_mode_of_batch_norm():
    plan = PLAN.with_batch_norm("synchronized")
    assert wb.search(plan, MACHINE).plan.batch_norm == "synchronized"
    run = usual(plan)
    assert wb.search(GRAPH, MACHINE, run).plan.batch_norm == "synchronized"
