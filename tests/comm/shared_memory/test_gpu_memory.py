"""The same collectives where slots and buffers lie on a device, for which memory stands in.

What a rank writes there is late until it settles: a meeting without it would read what was before.
"""

import pytest
import torch
import torch.distributed as dist

from tests.comm import test_collectives, test_owned
from tests.comm.device import on_stand_in
from tests.comm.shared_memory import test_buffer, test_shared
from tests.oracle.comparing import judged
from tests.oracle.generated import numbered
from tests.ranks import all_ranks
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.groups.world import World

SEED = 31
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what drawn modules do


def opened(config, function, args):
    with World.open(config) as world:
        return function(world, *args)


@pytest.fixture
def on_device(on_ranks):
    """As `on_ranks`."""

    def run(size, function, *args):
        return on_ranks.seated(size, on_stand_in, opened, function, args)

    return run


def transport(world):
    return all_ranks(world).transport


def test_ranks_of_one_device_share_its_memory(on_device):
    assert on_device(3, transport) == ["memory of the GPU"] * 3


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4, 2), (5, 0, 1), (0, 0)])
def test_equal_plain_torch(on_device, sizes):
    on_device(len(sizes), test_collectives.gathers_and_scatters, sizes)


@pytest.mark.parametrize(("sizes", "others"), [((3, 3), (2, 4)), ((1, 4, 1), (3, 0, 3))])
def test_cut_anew(on_device, sizes, others):
    on_device(len(sizes), test_collectives.cuts_anew, sizes, others)


@pytest.mark.parametrize("sizes", [(1300, 0), (700, 1, 600)])
def test_what_does_not_fit_into_a_slot_goes_in_portions(on_device, sizes):
    on_device(len(sizes), test_shared.large, sizes, (3, 7))


@pytest.mark.parametrize("polls", [False, True])
def test_buffers_are_summed_step_after_step(on_device, polls):
    for shared, found in on_device(3, test_buffer.steps, polls):
        assert all(shared)
        for step, flats in enumerate(found):
            for flat in flats:
                each = torch.arange(len(flat)) % 5 + step
                assert torch.equal(flat, (3 * each + 3).float())


@pytest.mark.slow
def test_a_buffer_lives_as_long_as_its_memory(on_device):
    assert on_device(2, test_buffer.kept) == [([1, 1, 1], 0)] * 2


def test_ranks_may_wait_in_any_order(on_device):
    assert on_device(3, test_buffer.in_another_order) == [([24.0, 24.0], 3.0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_runs_are_as_one_process_computes_them(on_ranks, number):
    def run(size, function, *args, **limits):
        return on_ranks.seated(size, on_stand_in, function, *args, **limits)

    verdict = judged(numbered(SEED, number), run)
    assert verdict.right, verdict.why


@pytest.mark.parametrize("sizes", [(2, 1, 3), (0, 5)])
def test_what_a_rank_owns_is_summed_and_handed_out(on_device, sizes):
    test_owned.test_turn_after_turn(lambda size, *args: on_device(size, *args), sizes)


def one_after_the_other(world):
    group = all_ranks(world)
    flat = group.buffer(6, torch.zeros(1)).fill_(world.rank + 1.0)
    pending = start_all_reduce(flat, group)
    dist.barrier()
    for rank in range(world.size):
        if rank == world.rank:
            pending.poll()
        dist.barrier()
    pending.wait()
    return flat.tolist()


def test_a_sum_is_there_when_a_rank_says_so(on_device):
    assert on_device(2, one_after_the_other) == [[3.0] * 6] * 2
