"""Ranks that stand for others, of a large world."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.predict.machines import device, machine
from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.plan import Plan
from workbench.program.rows import Representatives

GRAPH = graphs.vgg()


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=64)
    return wb.Experiment(plan=plan, **given | fields)


@pytest.mark.parametrize(("world", "kept"), [(8, 2), (65_536, 2)])
def test_few_stand_for_many(world, kept):
    run = experiment(Plan.data_parallel(GRAPH, world), batch_size=4 * world)
    found = Representatives.of(run, machine())
    assert len(found.ranks) == kept
    assert len(found.column) == world


def test_kinds_of_blocks():
    run = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=19)  # 7 ranks have two rows, 5 have one
    found = Representatives.of(run, machine())
    assert found.ranks.tolist() == [0, 1, 6, 7, 8, 9]
    assert found.column.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 4, 5, 4, 5]


def test_a_reduced_experiment_keeps_its_server_and_the_shares_of_its_ranks():
    shares = (2.0, 1.0) * 6
    run = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=24, sync=ParameterServer(server=7))
    ranks = Representatives.of(run, None)
    own = ranks.reduced(run)
    assert own.plan.world_size == len(ranks.ranks) == 4
    assert ranks.ranks[own.sync.server] == 6 + run.sync.server % 2
    cut = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=24, shard_optimizer=shares)
    assert Representatives.of(cut, None).reduced(cut).shard_optimizer == (2.0, 1.0) * 2


def test_all_of_a_world_stand_for_themselves():
    run = experiment(Plan.hybrid(GRAPH, 4, 2))
    ranks = Representatives.all_of(run)
    assert ranks.reduced(run) is run
    assert ranks.column.tolist() == [0, 1, 2, 3]


def test_blocks_on_other_devices_are_other_kinds():
    slow, fast = device(name="slow"), device(name="fast", flops={"fp32": 2e9})
    mixed = machine(*(fast if rank < 4 else slow for rank in range(12)))
    run = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=24)
    alike, apart = Representatives.of(run, machine()), Representatives.of(run, mixed)
    assert {alike.ranks[column] for column in alike.column[4:]} <= set(range(4))
    assert {apart.ranks[column] for column in apart.column[4:]}.isdisjoint(range(4))
