"""The buckets of a perceptron of 4, 6 and 2 features, by hand: fc0 has 24 + 6, fc1 12 + 2."""

from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.plan import graphs
from workbench.plan.plans.plan import Plan
from workbench.program.buckets import (
    Bucket,
    Buckets,
    Column,
    Pieces,
    averaged,
    buckets_of,
    handed_out,
    itemsize,
    late,
    moved_by,
    piece,
    tail_names,
    updated,
)

GRAPH = graphs.mlp(4, 6, 2)
BYTES = {"fc0.weight": 96, "fc0.bias": 24, "fc1.weight": 48, "fc1.bias": 8}


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=32)
    return wb.Experiment(plan=plan, **given | fields)


def split(world=4, shares=(2, 1), **fields):
    """The first layer's 6 outputs over pairs, 4 on one and 2 on the other."""
    plan = Plan.data_parallel(GRAPH, world)
    return experiment(
        plan.with_layer("fc0", scheme="shard_out", group_size=2, shares=shares), **fields
    )


def of(run):
    return buckets_of(run, Pieces.of(run))


def by_rank(buckets):
    """The buckets of each rank."""
    return [buckets.of_place[place] for place in buckets.place]


def listed(buckets):
    return [
        [(bucket.group_size, bucket.names, bucket.sizes) for bucket in own]
        for own in by_rank(buckets)
    ]


def test_a_rank_holds_all_or_its_part():
    whole = Pieces.of(experiment(Plan.data_parallel(GRAPH, 2)))
    assert {name: size.tolist() for name, size in whole.sizes.items()} == {
        name: [size, size] for name, size in BYTES.items()
    }
    pieces = Pieces.of(split())
    assert pieces.sizes["fc0.weight"].tolist() == [64, 32, 64, 32]
    assert pieces.sizes["fc0.bias"].tolist() == [16, 8, 16, 8]
    assert pieces.sizes["fc1.weight"].tolist() == [48] * 4
    assert pieces.names == tuple(BYTES)


@pytest.mark.parametrize(("precision", "width"), [("fp64", 8), ("fp32", 4), ("bf16", 4)])
def test_an_element_has_the_bytes_of_its_precision(precision, width):
    run = split(precision=precision)
    assert Pieces.of(run).sizes["fc0.bias"].tolist() == [4 * width, 2 * width] * 2
    placed = run.plan.flow.weights["fc0.bias"]
    assert piece(placed, 2).tolist() == [4, 2]
    assert itemsize(placed, precision) == width


def test_other_types_have_their_own_bytes():
    graph = graphs.Builder((4, 2, 2)).norm("bn").add("flat", "flatten", (16,)).graph()
    run = experiment(Plan.data_parallel(graph, 2), precision="fp64")
    sizes = Pieces.of(run).sizes
    assert sizes["bn.running_mean"].tolist() == [32, 32]
    assert sizes["bn.num_batches_tracked"].tolist() == [8, 8]


def test_layers_add_up_their_weights():
    pieces = Pieces.of(split())
    found = pieces.by_layer(pieces.sizes)
    assert {name: size.tolist() for name, size in found.items()} == {
        "fc0": [80, 40, 80, 40],
        "fc1": [56] * 4,
    }
    (only,) = pieces.by_layer({"fc0.bias": pieces.sizes["fc0.bias"]}).values()
    assert only.tolist() == [16, 8, 16, 8]


def test_buckets_follow_backward_and_close_when_they_are_full():
    plan = Plan.data_parallel(GRAPH, 2)
    names = ("fc1.bias", "fc1.weight", "fc0.bias", "fc0.weight")
    sizes = tuple(BYTES[name] for name in names)
    assert listed(of(experiment(plan))) == [[(1, names, sizes)]] * 2
    for limit, count in ((56, 2), (57, 3), (9, 2), (8, 1)):
        sync = wb.Synchronous(bucket_bytes=limit)
        ((first, *_),) = of(experiment(plan, sync=sync)).of_place
        assert first.names == names[:count]
    each = of(experiment(plan, sync=wb.Synchronous(bucket_bytes=1)))
    assert [bucket.names for bucket in each.of_place[0]] == [(name,) for name in names]
    assert each.names == set(names)


def test_what_lies_over_groups_of_one_size_travels_together():
    buckets = of(split())
    ahead = (1, ("fc1.bias", "fc1.weight"), (8, 48))
    assert (
        listed(buckets)
        == [
            [ahead, (2, ("fc0.bias", "fc0.weight"), (16, 64))],
            [ahead, (2, ("fc0.bias", "fc0.weight"), (8, 32))],
        ]
        * 2
    )
    assert len(buckets.of_place) == 2


def test_equal_parts_are_one_place():
    buckets = of(split(shares=(1, 1)))
    assert len(buckets.of_place) == 1
    assert buckets.place.tolist() == [0, 0, 0, 0]


def test_what_one_rank_alone_has_travels_only_where_all_is_used_late():
    run = split(world=2)
    assert listed(of(run)) == [[(1, ("fc1.bias", "fc1.weight"), (8, 48))]] * 2
    later = split(world=2, sync=wb.Pipelined(width=2))
    assert listed(of(later))[1] == [
        (1, ("fc1.bias", "fc1.weight"), (8, 48)),
        (2, ("fc0.bias", "fc0.weight"), (8, 32)),
    ]
    assert (late(run), late(later), late(split(sync=wb.Pipelined(width=4)))) == (0, 1, 3)


def test_late_gradients_are_one_bucket_whatever_the_limit():
    sync = wb.Pipelined(width=2, bucket_bytes=1)
    (own,) = of(experiment(Plan.data_parallel(GRAPH, 2), sync=sync)).of_place
    assert [bucket.bytes for bucket in own] == [sum(BYTES.values())]


def test_a_rank_without_a_part_has_no_bucket_of_it():
    buckets = of(split(shares=(1, 0)))
    assert [len(own) for own in by_rank(buckets)] == [2, 1, 2, 1]
    first, second = buckets.columns()
    assert (first.group_size, second.group_size) == (1, 2)
    assert first.bytes.tolist() == [56] * 4
    assert first.there.tolist() == [1, 1, 1, 1]
    assert second.bytes.tolist() == [120, 0, 120, 0]
    assert second.there.tolist() == [1, 0, 1, 0]
    assert second.names == {"fc0.weight", "fc0.bias"}


def test_the_nth_buckets_of_all_ranks_travel_at_once():
    buckets = of(split(sync=wb.Synchronous(bucket_bytes=1)))
    columns = list(buckets.columns())
    assert [(column.group_size, column.number) for column in columns] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [column.bytes.tolist()[:2] for column in columns] == [
        [8, 8],
        [48, 48],
        [16, 8],
        [64, 32],
    ]


def test_some_parameters_buckets():
    buckets = of(split())
    some = buckets.within({"fc0.bias", "fc0.weight"})
    assert [bucket.group_size for own in some.of_place for bucket in own] == [2, 2]
    assert buckets.within(()).names == frozenset()
    assert buckets.within(buckets.names) == buckets


def test_buckets_and_columns_are_values():
    one, same, other = of(split()), of(split()), of(split(shares=(1, 1)))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != Buckets(one.of_place, one.place[::-1].copy())
    first, again = next(one.columns()), next(same.columns())
    assert first == again
    assert hash(first) == hash(again)
    assert first != list(one.columns())[1]
    assert first != next(other.columns())
    assert (one == 1, first == 1) == (False, False)


def test_local_steps_sum_no_gradients_and_average_all_that_have_replicas():
    run = split(sync=wb.LocalSGD(every=2))
    assert listed(of(run)) == [[]] * 4
    pieces = Pieces.of(run)
    assert (
        listed(averaged(run, pieces))
        == [
            [
                (1, ("fc1.weight", "fc1.bias"), (48, 8)),
                (2, ("fc0.weight", "fc0.bias"), (64, 16)),
            ],
            [
                (1, ("fc1.weight", "fc1.bias"), (48, 8)),
                (2, ("fc0.weight", "fc0.bias"), (32, 8)),
            ],
        ]
        * 2
    )
    alone = split(world=2, sync=wb.LocalSGD(every=2))
    assert averaged(alone, Pieces.of(alone)).names == {"fc1.weight", "fc1.bias"}


def test_momentum_that_is_averaged_travels_behind_the_parameters():
    plan, sync = Plan.data_parallel(GRAPH, 2), wb.LocalSGD(every=2, momentum="average")
    run = experiment(plan, sync=sync, optimizer=wb.SGD(lr=0.1, momentum=0.9))
    ((bucket,),) = averaged(run, Pieces.of(run)).of_place
    assert bucket.names == (*BYTES, *BYTES)
    assert bucket.bytes == 2 * sum(BYTES.values())
    plain = experiment(plan, sync=sync, optimizer=wb.SGD(lr=0.1))
    ((bucket,),) = averaged(plain, Pieces.of(plain)).of_place
    assert bucket.names == tuple(BYTES)
    adam = experiment(plan, sync=sync, optimizer=wb.Adam(lr=0.1))
    ((bucket,),) = averaged(adam, Pieces.of(adam)).of_place
    assert len(bucket.names) == 3 * len(BYTES)


def test_averages_close_at_the_same_limit():
    sync = wb.LocalSGD(every=2, bucket_bytes=120)
    run = experiment(Plan.data_parallel(GRAPH, 2), sync=sync)
    ((first, second),) = averaged(run, Pieces.of(run)).of_place
    assert first == Bucket(1, ("fc0.weight", "fc0.bias"), (96, 24))
    assert second == Bucket(1, ("fc1.weight", "fc1.bias"), (48, 8))


def test_rounds_are_summed_apart_from_the_rest():
    plan = Plan.hybrid(graphs.vgg(), 4, 2).with_rounds("B")
    tail = tail_names(plan)
    assert {name.partition(".")[0] for name in tail} == {"fc0", "fc1", "fc2"}
    assert tail_names(Plan.data_parallel(graphs.vgg(), 2)) == set()
    run = experiment(plan, sync=wb.Synchronous(per_round=True))
    for own in handed_out(run, Pieces.of(run)).of_place:
        for bucket in own:
            assert set(bucket.names) <= tail or not set(bucket.names) & tail
    names = [bucket.names for bucket in of(run).of_place[0]]
    assert names[0] == ("conv.bias", "conv.weight")


TWO = Bucket(1, ("a", "b"), (4 * 512, 4 * 256))


def moved(column, shares, element=4):
    return {name: size.tolist() for name, size in moved_by(column, element, shares).items()}


def test_replicas_move_their_shares_of_a_bucket():
    column = Column(1, 0, (TWO,), np.zeros(3, dtype=np.int64))
    assert moved(column, (1, 1, 1)) == {"a": [1024, 1024, 0], "b": [0, 0, 1024]}
    assert moved(column, (3, 0, 1)) == {"a": [2048, 0, 0], "b": [256, 0, 768]}
    assert moved(column, (1, 1, 1), 8) == {"a": [512 * 2, 512 * 2, 0], "b": [0, 0, 1024]}


def test_each_replica_group_divides_its_own_bucket():
    small = Bucket(2, ("a",), (4 * 256,))
    column = Column(2, 0, (replace(TWO, group_size=2), small), np.array([0, 1] * 3))
    assert moved(column, (1,) * 6) == {
        "a": [1024, 256, 1024, 512, 0, 256],  # 64, 128 and 64 elements of the small one
        "b": [0, 0, 0, 0, 1024, 0],
    }


def test_ranks_of_one_place_divide_by_their_own_groups_shares():
    column = Column(2, 0, (Bucket(2, ("a",), (4 * 256,)),), np.zeros(4, dtype=np.int64))
    assert moved(column, (1, 1, 3, 1)) == {"a": [256, 512, 768, 512]}


def test_a_place_without_a_bucket_moves_nothing():
    column = Column(2, 0, (Bucket(2, ("a",), (4 * 256,)), None), np.array([0, 1, 0, 1]))
    assert moved(column, (1,) * 4) == {"a": [512, 0, 512, 0]}


def test_a_rank_moves_what_it_holds_or_its_part_of_the_buckets():
    run = split(world=2)
    pieces = Pieces.of(run)
    whole = updated(pieces, None, 4, (1.0, 1.0))
    assert {name: size.tolist() for name, size in whole.items()} == {
        name: pieces.sizes[name].tolist() for name in pieces.names
    }
    parts = updated(pieces, of(run), 4, (1.0, 1.0))
    assert parts["fc0.weight"].tolist() == [64, 32]  # nobody else has it
    assert parts["fc1.bias"].tolist() == [8, 0]
    assert parts["fc1.weight"].tolist() == [0, 48]


def test_buckets_of_no_parameters_are_none():
    empty = Buckets(((),), np.zeros(2, dtype=np.int64))
    assert list(empty.columns()) == []
    assert empty.names == frozenset()
