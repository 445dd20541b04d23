"""Ranks wait longer than the time-out for one that says that it waits for a disk, or for data."""

import time

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce
from workbench.comm.messages.errors import CommTimeout
from workbench.comm.messages.waiting import RENEW_EVERY_S, Excuse

TIMEOUT_S = 2.0
LATE_S = 3 * TIMEOUT_S


def comes_late(world, seconds, is_excused):
    """Rank 1 comes to a sum that late."""
    world._watch.timeout_s = TIMEOUT_S
    group = all_ranks(world)
    if world.rank == 1 and is_excused:
        with world.excused():
            time.sleep(seconds)
    elif world.rank == 1:
        return world.store.wait(["seen"])
    try:
        return all_reduce(torch.ones(3), group).tolist()
    except CommTimeout as error:
        world.store.set("seen", "")
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_who_is_excused_is_waited_for(on_ranks, shared_memory):
    found = on_ranks(2, comes_late, LATE_S, True, shared_memory=shared_memory)
    assert found == [[2.0] * 3] * 2


def test_nobody_else_is(on_ranks):
    found = on_ranks(2, comes_late, LATE_S, False)[0]
    assert found.endswith("did not arrive: rank 1")


def meets_late(world):
    """The same where all ranks of a world meet."""
    world._watch.timeout_s = TIMEOUT_S
    if world.rank == 1:
        with world.excused():
            time.sleep(LATE_S)
    return world._watch.meet("a late meeting", str(world.rank))


@pytest.mark.slow
def test_so_it_is_where_all_meet(on_ranks):
    assert on_ranks(2, meets_late) == [["0", "1"]] * 2


class Notes:
    def __init__(self):
        self.counts = {}

    def add(self, key, amount):
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


def test_a_short_wait_says_nothing_and_a_long_one_again_and_again():
    notes, renewed = Notes(), []
    excuse = Excuse(notes, 1, lambda: renewed.append(1))
    for _ in range(3):
        with excuse.during():
            pass
    assert not notes.counts
    with excuse.during():
        while notes.counts.get("excused/1", 0) < 2:
            time.sleep(RENEW_EVERY_S / 100)
    excuse.close()
    assert len(renewed) >= 1
