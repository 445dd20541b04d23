"""A rank that is killed outright, without a word: processes of their own, for one of them dies."""

import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.errors import PeerLost

RANKS, VICTIM = 3, 1


def one_is_killed(rank, port, in_buffer, said):
    torch.set_num_threads(1)
    config = RankConfig(rank, RANKS, "127.0.0.1", port, "a world", timeout_s=60.0)
    try:
        with World.open(config) as world:
            group = all_ranks(world)
            assert group.transport == "shared memory"
            flat = group.buffer(4, torch.ones(1))
            if rank == VICTIM:
                world.store.wait([f"{r} is there" for r in range(RANKS) if r != VICTIM])
                os.kill(os.getpid(), signal.SIGKILL)
            world.store.set(f"{rank} is there", "")
            if in_buffer:
                start_all_reduce(flat, group).wait()
            else:
                all_reduce(flat, group)
    except PeerLost as error:
        said.put((rank, str(error)))


@pytest.mark.slow
@pytest.mark.parametrize("in_buffer", [False, True])
def test_the_others_are_told_who_died(in_buffer):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    processes = [
        context.Process(target=one_is_killed, args=(rank, store.port, in_buffer, said))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    messages = dict(said.get() for _ in range(RANKS - 1))
    assert set(messages) == {0, 2}
    assert any(message.endswith("rank 1 has died") for message in messages.values())
    for rank, message in messages.items():
        assert message.startswith(f"rank {rank} ")
        assert "rank 1 has died" in message
