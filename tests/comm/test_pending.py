"""The all-reduce beside the caller's own work."""

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.plan.placement.placement import Shard

LENGTHS = (1, 0, 3, 1000, 70_001, 2)


def sample(length, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator).to(dtype)


def many_at_once(world):
    replica, shard = all_ranks(world, "replica"), all_ranks(world, "shard")
    cut = Shard(0, (2,) * world.size)
    flats = [sample(length, world.rank) for length in LENGTHS]
    pendings = [start_all_reduce(flat, replica, layer=str(i)) for i, flat in enumerate(flats)]
    # The same ranks under another purpose: collectives on both go on side by side.
    piece = torch.full((2,), float(world.rank))
    gathered = [all_gather(piece, cut, shard).tolist() for _ in range(20)]
    for pending in reversed(pendings):
        pending.wait()
        pending.wait()  # a second time is nothing
    return flats, gathered


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_in_place_beside_other_collectives(on_either, size):
    answers = on_either(size, many_at_once)
    for i, length in enumerate(LENGTHS):
        expected = sum(sample(length, rank).double() for rank in range(size))
        results = [flats[i] for flats, _ in answers]
        torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(result, results[0]) for result in results)  # bitwise
    ranks = [float(rank) for rank in range(size) for _ in range(2)]
    assert all(gathered == [ranks] * 20 for _, gathered in answers)


def beside_a_computation(world):
    group = all_ranks(world)
    a = torch.randn(128, 128)
    flats = [torch.full((200_000,), float(world.rank + i)) for i in range(8)]
    pendings = []
    for flat in flats:
        for _ in range(10):
            a = torch.tanh(a @ a)
        pendings.append(start_all_reduce(flat, group))
    for pending in pendings:
        pending.wait()
    rows = world.recorder.rows()
    return [flat.unique().tolist() for flat in flats], [(row.calls, row.phase) for row in rows]


def test_runs_beside_a_computation(on_either):
    for values, rows in on_either(3, beside_a_computation):
        assert values == [[3.0 * i + 3.0] for i in range(8)]
        assert rows == [(8, "step")]


def polled(world, algorithm):
    """Whether it was there before rank 1 had begun, and the sum when it was said to be there."""
    group, beginning = all_ranks(world, "sums"), all_ranks(world, "beginning")
    flat, early = torch.full((5,), world.rank + 1.0), None
    if world.rank == 1:
        all_reduce(torch.ones(1), beginning)
    pending = start_all_reduce(flat, group, algorithm=algorithm)
    if world.rank == 0:
        early = pending.poll()
        all_reduce(torch.ones(1), beginning)
    while not pending.poll():
        pass
    return early, flat.tolist()


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [("backend", ()), ("ring", ()), ("direct", ()), ("hierarchical", ("a", "b"))],
)
def test_it_is_there_when_it_says_so(on_ranks, algorithm, hosts):
    answers = on_ranks(2, polled, algorithm, hosts=hosts)
    assert answers == [(False, [3.0] * 5), (None, [3.0] * 5)]


def half_types(world):
    group, results = all_ranks(world), []
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        flat = sample(50, world.rank, dtype)
        start_all_reduce(flat, group).wait()
        results.append(flat)
    return results


def test_half_types_are_summed_in_fp32(on_either):
    answers = on_either(4, half_types)
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64, torch.int64)):
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        expected = sum(sample(50, rank, dtype).to(wide) for rank in range(4)).to(dtype)
        for results in answers:
            assert results[i].dtype == dtype
            torch.testing.assert_close(results[i], expected)


def refused(world):
    group, messages = all_ranks(world), []
    for x in (torch.ones(2, 3), torch.ones(6)[::2]):
        with pytest.raises(ValueError, match="one contiguous dimension") as caught:
            start_all_reduce(x, group)
        messages.append(str(caught.value))
    return messages


def test_refuses_what_is_not_flat(on_either):
    what, where = "an all-reduce in place takes one contiguous dimension, got", "in group world(0)"
    assert on_either(1, refused)[0] == [
        f"{what} shape (2, 3), stride (3, 1), {where}",
        f"{what} shape (3,), stride (2,), {where}",
    ]
