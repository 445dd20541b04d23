"""When the gradients of each bucket begin to be summed."""

import workbench as wb
from tests.plan import graphs
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.program.unrolling import Reductions

GRAPH = graphs.vgg()  # in order: conv, fc1, fc2; backward goes the other way


def reductions(plan, bucket_bytes=2**20):
    sync = wb.Synchronous(bucket_bytes=bucket_bytes)
    run = wb.Experiment(
        plan=plan, data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=32, sync=sync
    )
    program = program_of(run)
    sums = Reductions(run, program.buckets)
    over_pairs = {n for n in program.pieces.names if plan.flow.weights[n].group_size == 2}
    return sums, over_pairs, set(program.pieces.names) - over_pairs


def test_a_bucket_that_is_filled_early_waits_for_those_ahead_of_it():
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc1", scheme="shard_out", group_size=2)
    sums, over_pairs, others = reductions(plan)
    assert not list(sums.settle(over_pairs, 3))
    begun = list(sums.settle(others, 5))
    assert [reduce.column.group_size for reduce in begun] == [1, 2]
    assert {index for reduce in begun for index in reduce.after} == {5}


def test_what_backward_does_not_reach_begins_at_the_end():
    sums, _, names = reductions(Plan.data_parallel(GRAPH, 2), bucket_bytes=1)
    some = min(names)
    assert len(list(sums.settle([some], 7))) in (0, 1)  # the others are ahead of it, or behind
    assert len(list(sums.finish())) >= len(names) - 1
    assert not list(sums.finish())


def test_a_sum_begins_with_the_last_of_its_group():
    """Rank 1 of each pair has no part of fc1, and fills the bucket of what all hold in its turn."""
    plan = Plan.data_parallel(GRAPH, 4).with_layer(
        "fc1", scheme="shard_out", group_size=2, shares=(1, 0)
    )
    sums, over_pairs, others = reductions(plan, bucket_bytes=1)
    begun = [reduce for name in sorted(others) for reduce in sums.settle([name], 1)]
    begun += sums.settle(over_pairs, 2)
    begun += sums.finish()
    assert {(r.column.group_size, r.members) for r in begun} == {(1, (0,)), (2, (0,))}
    for reduce in begun:
        ahead = [place for place, bucket in enumerate(reduce.column.of_place) if bucket]
        assert all(reduce.after[place] in (1, 2) for place in ahead)


def test_each_begins_once_and_all_begin_again_in_the_next_round():
    sums, _, names = reductions(Plan.data_parallel(GRAPH, 2))
    assert len(list(sums.settle(names, 0))) == 1
    assert not list(sums.settle(names, 1))
    sums.begin()
    assert len(list(sums.settle(names, 2))) == 1
