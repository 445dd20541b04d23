"""Every rank has something of its own for every other."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.comm.collectives import all_to_all_v
from workbench.comm.shared_memory.meeting import SLOT_BYTES


def exchange(world, cases):
    """What came on this rank in each case, and what was recorded."""
    ranks = tuple(range(world.size))
    group = world.groups([("reshard", ranks)])["reshard", ranks]
    found = []
    for sizes, dtype in cases:
        flat = torch.cat([part(world.rank, to, n, dtype) for to, n in enumerate(sizes[world.rank])])
        before = world.recorder.rows()
        came = all_to_all_v(flat, sizes, group)
        after = world.recorder.rows()
        received = sum(r.bytes for r in after) - sum(r.bytes for r in before)
        found.append((came, received))
    return found


def part(source, target, count, dtype):
    return (torch.arange(count) * 7 + 100 * source + target).remainder(120).to(dtype)


def check(run, world_size, cases):
    for rank, found in enumerate(run(world_size, exchange, cases)):
        for (sizes, dtype), (came, received) in zip(cases, found, strict=True):
            for source, tensor in enumerate(came):
                assert torch.equal(tensor, part(source, rank, sizes[source][rank], dtype))
            others = [row[rank] for source, row in enumerate(sizes) if source != rank]
            assert received == sum(others) * dtype.itemsize


def test_everything_arrives_where_it_should(on_either):
    more_than_a_slot = SLOT_BYTES // 4 + 17
    cases = [
        (((0, 1, 2), (3, 0, 4), (5, 6, 0)), torch.float32),
        (((0, 0, 0), (0, 0, 0), (0, 0, 0)), torch.float32),
        (((2, 0, 0), (0, 0, 0), (0, 9, 1)), torch.int64),
        (((0, more_than_a_slot, 3), (1, 1, 1), (2 * more_than_a_slot, 0, 0)), torch.float32),
    ]
    check(on_either, 3, cases)


@settings(max_examples=2, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sizes(on_either, data):
    world = data.draw(st.integers(2, 4))
    sizes = st.tuples(*[st.tuples(*[st.integers(0, 5)] * world)] * world)
    dtypes = st.sampled_from([torch.float64, torch.bfloat16, torch.int64])
    check(on_either, world, data.draw(st.lists(st.tuples(sizes, dtypes), min_size=1, max_size=9)))


def test_sizes_must_fit(on_ranks):
    def refused(world):
        group = world.groups([("reshard", (0,))])["reshard", (0,)]
        with pytest.raises(ValueError, match="1 x 1 sizes"):
            all_to_all_v(torch.zeros(1), ((1, 1),), group)
        with pytest.raises(ValueError, match="sends 2 elements"):
            all_to_all_v(torch.zeros(1), ((2,),), group)
        return all_to_all_v(torch.ones(2), ((2,),), group)[0].tolist()

    assert on_ranks(1, refused) == [[1.0, 1.0]]


def out_of_order(world):
    ranks = (2, 0, 1)
    group = world.groups([("odd", ranks)])["odd", ranks]
    sent = 10.0 * world.rank + torch.arange(3)
    return [part.item() for part in all_to_all_v(sent, [[1] * 3] * 3, group)]


def test_ranks_of_a_group_need_not_ascend(on_either):
    """What comes is in the order of the group, however torch would sort its ranks."""
    assert on_either(3, out_of_order) == [[21, 1, 11], [22, 2, 12], [20, 0, 10]]
