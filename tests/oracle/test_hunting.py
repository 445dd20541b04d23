"""A hunt goes on when a case has ended the process of a rank, as a fault within torch may."""

import os

import pytest

from tests.oracle.hunting import Engines
from tests.ranks import RankDied


def end(config):
    if config.rank == 1:
        os._exit(1)
    return number(config)


def number(config):
    return config.rank


@pytest.mark.slow
def test_a_rank_that_dies_is_one_failure():
    with Engines() as engines:
        with pytest.raises(RankDied, match="rank 1"):
            engines.seated(2, end)
        assert engines.seated(2, number) == [0, 1]
