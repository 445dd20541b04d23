from workbench.plan.placement.mesh import (
    group_sizes,
    replica_group,
    replica_groups,
    shard_group,
    shard_groups,
)


def test_groups_of_two_among_four():
    assert shard_groups(2, 4) == ((0, 1), (2, 3))
    assert replica_groups(2, 4) == ((0, 2), (1, 3))


def test_the_two_extremes():
    assert shard_groups(1, 4) == ((0,), (1,), (2,), (3,))
    assert replica_groups(1, 4) == ((0, 1, 2, 3),)
    assert shard_groups(4, 4) == ((0, 1, 2, 3),)
    assert replica_groups(4, 4) == ((0,), (1,), (2,), (3,))


def test_every_rank_stands_in_both_of_its_groups():
    for world in range(1, 13):
        for k in group_sizes(world):
            for rank in range(world):
                assert shard_group(rank, k)[rank % k] == rank
                assert replica_group(rank, k, world)[rank // k] == rank


def test_group_sizes_divide():
    assert group_sizes(12) == (1, 2, 3, 4, 6, 12)
