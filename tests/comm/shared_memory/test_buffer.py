"""Buffers in shared memory, summed in place."""

import gc
import sys

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.shared_memory.meeting import SEGMENT_BYTES
from workbench.plan.placement.placement import Shard

LENGTHS = (1, 3, 1000, 70_001)


def steps(world, polls):
    """Several steps with several buckets, each overwritten as soon as it has been waited for."""
    group = all_ranks(world)
    flats = [group.buffer(length, torch.zeros(1)) for length in LENGTHS]
    shared, found = [group.shared(flat) is not None for flat in flats], []
    for step in range(6):
        pendings = []
        for flat in flats:
            flat.copy_(torch.arange(len(flat)) % 5 + step + group.rank)
            pendings.append(start_all_reduce(flat, group))
            if polls:
                pendings = [pending for pending in pendings if not pending.poll()]
        for pending in pendings:
            pending.wait()
            assert pending.poll()
        found.append([flat.clone() for flat in flats])
        for flat in flats:
            flat.mul_(0)  # others may not see this
    return shared, found


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_step_after_step(on_either, size, polls):
    for shared, found in on_either(size, steps, polls):
        assert len(set(shared)) == 1
        for step, flats in enumerate(found):
            for flat in flats:
                each = torch.arange(len(flat)) % 5 + step
                assert torch.equal(flat, (size * each + size * (size - 1) // 2).float())


def in_another_order(world):
    """A rank blocked elsewhere still does its part of what it has started."""
    one, two = all_ranks(world, "one"), all_ranks(world, "two")
    flats = [group.buffer(8, torch.zeros(1)).fill_(1.0) for group in (one, two)]
    pendings = [
        start_all_reduce(flat, group) for flat, group in zip(flats, (one, two), strict=True)
    ]
    cut, gathered = Shard(0, (1,) * world.size), None
    if world.rank == 0:
        pendings[0].wait()
        gathered = all_gather(torch.ones(1), cut, one)
        pendings[1].wait()
    else:
        pendings[1].wait()
        gathered = all_gather(torch.ones(1), cut, one)
        pendings[0].wait()
    return [flat.sum().item() for flat in flats], gathered.sum().item()


def test_ranks_may_wait_in_any_order(on_ranks):
    assert on_ranks(3, in_another_order) == [([24.0, 24.0], 3.0)] * 3


def refused(world):
    group = all_ranks(world)
    flat = group.buffer(4, torch.zeros(1))
    pending = start_all_reduce(flat, group)
    with pytest.raises(RuntimeError, match="must be waited for") as caught:
        start_all_reduce(flat, group)
    pending.wait()
    return str(caught.value)


def test_one_sum_of_a_buffer_at_a_time(on_ranks):
    on_ranks(2, refused)


def kept(world):
    group = all_ranks(world)
    counts = []
    for _ in range(3):
        flat = group.buffer(1000, torch.zeros(1))
        part = flat[10:20]
        del flat
        gc.collect()
        counts.append(len(group.link.buffers))
        part += 1  # a view keeps the memory
        del part
    gc.collect()
    return counts, len(group.link.buffers)


@pytest.mark.slow
def test_a_buffer_lives_as_long_as_its_memory(on_ranks):
    assert on_ranks(2, kept) == [([1, 1, 1], 0)] * 2


def mapped(_world):
    gc.collect()
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:workbench")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_stays_mapped_when_a_world_is_over(on_ranks):
    before = on_ranks(2, mapped, anew=True)
    for _ in range(3):
        on_ranks(2, steps, True, anew=True)
    after = on_ranks(2, mapped, anew=True)
    assert all(now <= then for now, then in zip(after, before, strict=True))


def held(world):
    group = all_ranks(world)
    before = world.shared_bytes
    flat = group.buffer(1000, torch.zeros(0))
    return before, world.shared_bytes - before, flat.nbytes


def test_the_account_of_memory_has_slots_buffers_and_sums(on_ranks):
    assert on_ranks(2, held) == [(SEGMENT_BYTES, 4000 + 2000, 4000)] * 2
    assert on_ranks(1, held) == [(0, 0, 4000)]
