"""Ranks that stand for others, of a large world."""

from dataclasses import replace

import pytest

import workbench as wb
from tests.plan import graphs
from tests.predict.machines import device, link, machine
from workbench.plan.experiment.experiment import ParameterServer
from workbench.plan.placement.placement import ROWS, Layout, Partial, Replicate, Shard
from workbench.plan.plans.plan import Plan
from workbench.program.rows import (
    HostLayout,
    Representatives,
    Rows,
    block_of,
    features,
    group_sizes_of,
    micro_batches,
)

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


def test_blocks_over_other_borders_of_hosts_are_other_kinds():
    run = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=24)
    hosts = machine(ranks_per_host=3, across=link())
    found = Representatives.of(run, hosts)
    assert found.ranks.tolist() == [0, 1, 2, 3]  # within a host, and over a border
    assert found.column.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]
    within = Representatives.of(run, machine(ranks_per_host=4, across=link()))
    assert within.ranks.tolist() == [0, 1, 2, 3]
    assert within.column.tolist() == [0, 1] * 6


def test_representatives_are_values():
    run = experiment(Plan.hybrid(GRAPH, 12, 2), batch_size=24)
    one, same = Representatives.of(run, None), Representatives.of(run, None)
    assert one == same
    assert hash(one) == hash(same)
    assert one != Representatives.all_of(run)
    assert one != Representatives.of(run.replace(batch_size=48), None)
    assert one != replace(one, column=one.column[::-1])
    assert one != replace(one, ranks=one.ranks[::-1])
    assert one != 1


def test_rows_are_compared_by_their_numbers():
    rows = Rows([2, 0, 1, 1])
    assert rows == Rows([2, 0, 1, 1])
    assert hash(rows) == hash(Rows((2, 0, 1, 1)))
    assert rows != Rows([0, 2, 1, 1])
    assert rows != [2, 0, 1, 1]
    assert rows.world_size == 4
    assert repr(rows) == "Rows([2, 0, 1, 1])"


def test_groups_have_the_rows_of_their_members():
    rows = Rows([2, 0, 1, 1])
    assert rows.over(1).tolist() == [2, 0, 1, 1]
    assert rows.over(2).tolist() == [2, 2, 2, 2]
    assert Rows([2, 0, 1, 4]).over(2).tolist() == [2, 2, 5, 5]
    assert Rows([2, 0, 1, 4]).over(4).tolist() == [7] * 4


IMAGE = (3, 4, 5)


@pytest.mark.parametrize(
    ("layout", "each"),
    [
        (ROWS, [60] * 4),
        (Layout(2, Replicate()), [60] * 4),
        (Layout(2, Partial()), [60] * 4),
        (Layout(2, Shard(1, (2, 1))), [40, 20] * 2),
        (Layout(2, Shard(2, (1, 3))), [15, 45] * 2),
        (Layout(2, Shard(3, (5, 0))), [60, 0] * 2),
        (Layout(4, Shard(1, (1, 0, 2, 0))), [20, 0, 40, 0]),
    ],
)
def test_a_sample_has_so_many_elements_on_each_rank(layout, each):
    assert features(layout, IMAGE, 4).tolist() == each
    rows = Rows([1, 0, 2, 3])
    held = rows.own if layout == ROWS else rows.over(layout.group_size)
    assert rows.elements(layout, IMAGE, 1).tolist() == (held * each).tolist()
    assert rows.elements(layout, IMAGE, 7).tolist() == (7 * held * each).tolist()
    assert rows.elements(layout, IMAGE, 0).tolist() == [60] * 4


def test_micro_batches_share_the_rows():
    run = experiment(Plan.data_parallel(GRAPH, 2), batch_size=7, accumulate=3)
    assert micro_batches(run) == [(2, 1), (1, 1), (1, 1)]
    assert micro_batches(run, 2) == [(1, 0), (1, 0)]
    assert [sum(own) for own in micro_batches(run, 3)] == [1, 1, 1]


def test_group_sizes_of_a_plan():
    plan = Plan.data_parallel(GRAPH, 12)
    assert (group_sizes_of(plan), block_of(plan)) == ((1,), 1)
    mixed = plan.with_layer("fc0", scheme="shard_out", group_size=4).with_layer(
        "fc2", scheme="shard_out", group_size=6
    )
    assert group_sizes_of(mixed) == (1, 4, 6)
    assert block_of(mixed) == 12


def test_ranks_fill_their_hosts():
    assert HostLayout.of(8).ranks == (8,)
    assert HostLayout.of(8, 3).ranks == (3, 3, 2)
    assert HostLayout.of(6, 3).ranks == (3, 3)
    assert HostLayout.of(2, 3).ranks == (2,)


GROUPS = [[0, 2, 4], [1, 3, 5]]


def test_the_ranks_of_a_group_by_host():
    two = HostLayout.of(6, 4)  # 0 to 3, and 4 and 5
    assert two.over(GROUPS) == [(2, 1), (2, 1)]
    assert two.mates(GROUPS).tolist() == [2, 2, 2, 2, 1, 1]
    assert two.index(GROUPS).tolist() == [0, 0, 1, 1, 0, 0]
    one = HostLayout.of(6)
    assert one.over(GROUPS) == [(3,), (3,)]
    assert one.mates(GROUPS).tolist() == [3] * 6
    assert one.index(GROUPS).tolist() == [0, 0, 1, 1, 2, 2]
    apart = HostLayout((1, 5))
    assert apart.over([[0, 1, 2]]) == [(1, 2)]
    assert apart.mates([[0, 1, 2]]).tolist() == [1, 2, 2, 1, 1, 1]  # others are in no group
