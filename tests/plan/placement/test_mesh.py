import pytest

from workbench.plan.io.errors import PlanError
from workbench.plan.placement.placement import (
    RankConfig,
    group_sizes,
    replica_group,
    replica_groups,
    require_group,
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


def test_a_group_that_divides_the_world_is_taken():
    assert [require_group(k, 6) for k in (None, 1, 2, 3, 6)] == [6, 1, 2, 3, 6]


@pytest.mark.parametrize("k", [0, 4, 7, -1])
def test_a_group_that_does_not_divide_the_world_is_refused(k):
    with pytest.raises(PlanError, match=rf"{k} does not divide world_size 6; valid are 1, 2, 3, 6"):
        require_group(k, 6)


def test_a_rank_waits_30_seconds_on_one_thread_of_a_cpu_and_shares_memory():
    config = RankConfig(rank=1, world_size=2, address="localhost", port=1, prefix="a")
    assert (config.timeout_s, config.device, config.threads) == (30.0, "cpu", 1)
    assert (config.shared_memory, config.host) == (True, "")
