"""Waiting for ranks that do not come: who is named, how fast it ends, and what works after it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather, broadcast
from workbench.comm.groups.world import RankConfig, SealedStore, World
from workbench.comm.messages.errors import CommTimeout, PeerLost
from workbench.comm.messages.waiting import PeerWatch
from workbench.plan.placement.placement import Shard

ABSENT = 1


def one_does_not_come(world):
    group = all_ranks(world, "replica")
    if world.rank == ABSENT:
        world.store.wait(["0 gave up", "2 gave up"])
        return None
    with pytest.raises(CommTimeout) as caught:
        all_reduce(torch.ones(8), group, layer="fc1")
    world.store.set(f"{world.rank} gave up", "")
    return str(caught.value), caught.value.missing


def sum_of_ones(world):
    return all_reduce(torch.ones(3), all_ranks(world)).tolist()


@pytest.mark.slow
def test_a_timeout_names_who_did_not_come_and_the_next_world_works(on_either):
    began = time.monotonic()
    answers = on_either(3, one_does_not_come, timeout_s=2.0)
    assert on_either(3, sum_of_ones) == [[3.0] * 3] * 3
    # Closing a world with a collective under way waits for nobody.
    assert time.monotonic() - began < 40.0
    for rank in (0, 2):
        assert answers[rank] == (
            f"rank {rank} waited over 2 s for all_reduce of layer 'fc1' (call 1 of group "
            "replica(0,1,2)); did not arrive: rank 1",
            (ABSENT,),
        )


def at_different_collectives(world):
    shard, replica = all_ranks(world, "shard"), all_ranks(world, "replica")
    x, pending = torch.ones(1), None
    if world.rank == 1:
        pending = start_all_reduce(x, replica, layer="bucket 0")
    with pytest.raises(CommTimeout) as caught:
        pending.wait() if pending else broadcast(x, 1, shard, layer="fc1")
    # Whoever left first would be what the other has lost.
    world.store.set(f"{world.rank} gave up", "")
    world.store.wait(["0 gave up", "1 gave up"])
    return str(caught.value)


@pytest.mark.slow
def test_a_timeout_says_where_the_others_wait(on_either):
    answers = on_either(2, at_different_collectives, timeout_s=3.0)
    assert answers[0].endswith(
        "did not arrive: rank 1 (waits for all_reduce of layer 'bucket 0' (call 1 of group "
        "replica(0,1)))"
    )
    assert answers[1].endswith(
        "did not arrive: rank 0 (waits for broadcast of layer 'fc1' (call 1 of group shard(0,1)))"
    )


def one_comes_late(world):
    group = all_ranks(world)
    if world.rank == 1:
        world.store.wait(["waits/0"])  # posted after a second
    total = all_reduce(torch.ones(2), group)
    all_reduce(total, group)
    return total.tolist(), world.store.get("waits/0").decode()


@pytest.mark.slow
def test_a_late_rank_is_waited_for_and_the_post_withdrawn(on_either):
    assert on_either(2, one_comes_late) == [([2.0, 2.0], "")] * 2


def blocking(group):
    all_gather(torch.ones(1), Shard(0, (1, 1)), group)


def background(group):
    start_all_reduce(torch.ones(1), group).wait()


def bucket(group):
    start_all_reduce(group.buffer(1, torch.ones(1)), group).wait()


def messages(group):
    start_all_reduce(torch.ones(2), group, algorithm="ring").wait()


def interrupted(world, collective):
    group = all_ranks(world)
    if world.rank == 1:
        if collective is bucket:
            group.buffer(1, torch.ones(1))
        world.store.wait(["pid", "waits/0"])  # rank 0 has been blocked for a second
        began = time.monotonic()
        os.kill(int(world.store.get("pid")), signal.SIGINT)
        world.store.wait(["caught"])
        return time.monotonic() - began
    world.store.set("pid", str(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        collective(group)
    world.store.set("caught", "")
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("collective", [blocking, background, bucket, messages])
def test_a_blocked_collective_can_be_interrupted(on_either, collective):
    began = time.monotonic()
    assert max(on_either(2, interrupted, collective, anew=True)) < 20.0
    assert on_either(2, sum_of_ones) == [[2.0] * 3] * 2
    assert time.monotonic() - began < 40.0


def one_leaves(world, raises):
    group, shard = all_ranks(world), Shard(0, (1, 1, 0))
    if world.rank == 1 and raises:
        raise ArithmeticError("rank 1 has had enough")
    if world.rank == 1:
        return None
    with pytest.raises(PeerLost) as caught:
        all_gather(torch.ones(shard.sizes[world.rank]), shard, group, layer="fc2")
    if raises:
        raise caught.value
    return str(caught.value)


def test_a_lost_peer_is_reported_at_once_with_layer_and_group(on_either):
    began = time.monotonic()
    answers = on_either(3, one_leaves, False, anew=True)
    assert time.monotonic() - began < 40.0
    for rank in (0, 2):
        assert answers[rank].startswith(
            f"rank {rank} lost a peer in all_gather of layer 'fc2' (call 1 of group world(0,1,2)): "
        )


@pytest.mark.slow
def test_the_first_failure_is_shown_and_the_next_world_works(on_either):
    with pytest.raises(Exception, match="had enough"):
        on_either(3, one_leaves, True)
    assert on_either(3, sum_of_ones) == [[3.0] * 3] * 3


class Never:
    """A work of a collective to which somebody does not come."""

    def is_completed(self):
        return False

    def wait(self, timeout):
        raise RuntimeError("not done")


def test_waiting_ends_when_another_rank_gives_up():
    store = dist.HashStore()
    lost, waiting, meeting = (PeerWatch(store, rank, 3, timeout_s=20.0) for rank in range(3))
    lost.give_up(ArithmeticError("enough"))
    meeting.give_up(ArithmeticError("enough of that"))  # the first one counts
    said = "rank 0 gave up after ArithmeticError: enough"
    with pytest.raises(PeerLost) as caught:
        waiting.wait([Never()], (0, 1), "all_reduce (call 7)")
    assert str(caught.value) == f"rank 1 waited for all_reduce (call 7); {said}"
    with pytest.raises(PeerLost) as caught:
        meeting.meet("dinner", "")
    assert str(caught.value) == f"rank 2 waited for dinner; {said}"


def test_whoever_leaves_a_world_with_an_error_says_so():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = torch.get_num_threads()
    with pytest.raises(ArithmeticError):
        with World.open(RankConfig(0, 1, "127.0.0.1", store.port, "a world", threads=threads)):
            raise ArithmeticError("enough")
    notes = SealedStore(dist.PrefixStore("a world", store), "")
    assert notes.check(["given up"])
    assert notes.get("given up") == b"rank 0 gave up after ArithmeticError: enough"
