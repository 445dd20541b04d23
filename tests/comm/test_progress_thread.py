"""All-reduces that go on while their rank does something else, and what becomes of failed ones."""

import threading
import time

import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.messages.errors import PeerLost
from workbench.comm.pending import Pending, ProgressThread

LONG_S = 60.0


def computing(world, algorithm, attended, count=3):
    """Rounds that began while the rank neither polled nor waited, and the sums."""
    group = all_ranks(world)
    flats = [torch.arange(5.0) * (world.rank + 1) + index for index in range(count)]
    started = [start_all_reduce(flat, group, algorithm=algorithm) for flat in flats]
    thread = ProgressThread()
    if attended:
        thread.attend(started)
    world.store.set(f"{world.rank} has started", "")
    world.store.wait([f"{rank} has started" for rank in range(world.size)])
    until = time.monotonic() + (LONG_S if attended else 0.2)
    while rounds(world) < 4 * count and time.monotonic() < until:
        time.sleep(0.001)
    seen = rounds(world)
    for pending in started:
        pending.wait()
    return seen, flats


def rounds(world):
    return sum(row.rounds for row in world.recorder.rows() if row.op == "all_reduce")


def test_rounds_follow_each_other_by_themselves(on_ranks):
    expected = [torch.arange(5.0) * 6 + 3 * index for index in range(3)]
    for seen, flats in on_ranks(3, computing, "ring", True, shared_memory=False):
        assert seen == 12
        assert all(map(torch.equal, flats, expected))
    for seen, flats in on_ranks(3, computing, "ring", False, shared_memory=False):
        assert seen < 12  # only what was looked after in passing
        assert all(map(torch.equal, flats, expected))


class Slow:
    """A sum that is under way until somebody says that it is done."""

    by_itself = False

    def __init__(self):
        self.looked_after, self.done = threading.Event(), threading.Event()

    def poll_beside(self):
        self.looked_after.set()
        return self.done.is_set()


def test_what_came_earlier_is_still_attended_to():
    thread, first, second = ProgressThread(), Slow(), Slow()
    thread.attend([first])
    assert first.looked_after.wait(LONG_S)
    thread.attend([second])
    assert second.looked_after.wait(LONG_S)
    first.looked_after.clear()
    assert first.looked_after.wait(LONG_S)
    first.done.set()
    second.done.set()


class Failing(Slow):
    """A sum that fails whenever it is looked after."""

    def poll_beside(self):
        self.looked_after.set()
        raise PeerLost("rank 7 is gone")


def test_what_has_failed_is_let_go():
    thread, failing = ProgressThread(), Failing()
    thread.attend([failing])
    assert failing.looked_after.wait(LONG_S)
    until = time.monotonic() + LONG_S
    while thread._under_way and time.monotonic() < until:
        time.sleep(0.001)
    assert thread._under_way == []


class Stuck:
    """A sum that fails when it is looked after."""

    def __init__(self):
        self.looks = 0

    def advance(self):
        self.looks += 1
        if self.looks > 1:
            raise PeerLost("rank 7 is gone")
        return False

    def wait(self):
        raise AssertionError("it has failed already")


def test_a_failure_on_the_thread_is_raised_again(on_ranks):
    assert on_ranks(1, stuck) == [["rank 7 is gone"] * 2]


def stuck(world):
    group = all_ranks(world)
    progress = Stuck()
    pending = Pending(group.call("all_reduce", "", "step"), progress)
    ProgressThread().attend([pending])
    while progress.looks < 2:
        time.sleep(0.001)
    said = []
    for _ in range(2):
        try:
            pending.wait()
        except PeerLost as error:
            said.append(str(error))
    return said
