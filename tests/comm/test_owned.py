"""Buffers of which each rank owns a segment: two synchronisations, with an update in between."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.algorithms.test_algorithms import DTYPES, PROFILE, samples
from tests.comm.lockstep import run
from tests.ranks import all_ranks
from workbench.comm.algorithms.flat import FLAT, from_owners, to_owners
from workbench.comm.messages.flat import cut
from workbench.comm.owned import Owned

SIZES = [(5,), (40_000, 40_001), (7, 1, 3, 3), (0, 9, 2), (0, 0, 6, 0)]
TURNS = 4


@PROFILE
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=7), dtype=DTYPES)
def test_whoever_owns_what_sums_have_the_bits_of_direct(sizes, dtype):
    """By k - 1 messages there, as many back, and (k - 1) s additions of s own elements."""
    ranks, length = len(sizes), sum(sizes)
    whole, flats = samples(length, ranks, dtype), samples(length, ranks, dtype)
    run([FLAT["direct"].rounds(flat, range(ranks), me) for me, flat in enumerate(whole)])
    there = run([to_owners(flat, sizes, range(ranks), me) for me, flat in enumerate(flats)])
    for me, flat in enumerate(flats):
        mine = cut(flat, sizes)[me]
        assert torch.equal(mine, cut(whole[me], sizes)[me])
        mine.add_(1)
    back = run([from_owners(flat, sizes, range(ranks), me) for me, flat in enumerate(flats)])
    assert all(torch.equal(flat, whole[0] + 1) for flat in flats)
    for me, own in enumerate(sizes):
        others = [size for other, size in enumerate(sizes) if other != me]
        once = int(ranks > 1)
        assert there[me] == ((own > 0) * len(others), own * len(others) * dtype.itemsize, once)
        assert back[me] == (sum(n > 0 for n in others), sum(others) * dtype.itemsize, once)


def turns(world, sizes):
    """Each rank scales what it owns; a turn begins as soon as the last one's pieces are read."""
    group, found = all_ranks(world), []
    owned = Owned(sizes, group, torch.zeros(0))
    for turn in range(TURNS):
        owned.flat.copy_(brought(sum(sizes), turn, group.rank))
        owned.start_sum(layer="gradients").wait()
        owned.outgoing.copy_(owned.mine * (group.rank + 2))
        owned.start_hand_out(layer="parameters").wait()
        found.append(torch.cat(list(owned.pieces)))
    return found, [row for row in world.recorder.rows() if row.layer]


def brought(length, turn, rank):
    return torch.randn(length, generator=torch.Generator().manual_seed(10 * turn + rank))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_turn_after_turn(on_either, sizes):
    ranks, length = len(sizes), sum(sizes)
    scales = torch.cat([torch.full((size,), rank + 2.0) for rank, size in enumerate(sizes)])
    for rank, (found, (there, back)) in enumerate(on_either(ranks, turns, sizes)):
        for turn, handed_out in enumerate(found):
            total = torch.zeros(length)
            for each in range(ranks):
                total += brought(length, turn, each)
            assert torch.equal(handed_out, total * scales)
        others = [size for other, size in enumerate(sizes) if other != rank]
        own = sizes[rank] * (ranks - 1)
        assert (there.op, there.layer, there.calls) == ("reduce_scatter", "gradients", TURNS)
        assert (back.op, back.layer, back.calls) == ("all_gather", "parameters", TURNS)
        assert (there.rounds, back.rounds) == (TURNS * (ranks > 1),) * 2
        assert there.messages == TURNS * (ranks - 1) * (sizes[rank] > 0)
        assert back.messages == TURNS * sum(size > 0 for size in others)
        assert (there.bytes, back.bytes) == (4 * TURNS * own, 4 * TURNS * sum(others))
        assert (there.additions, back.additions) == (TURNS * own, 0)


def given_up(world, sizes):
    """Every other sum is used by nobody; some ranks are late each time."""
    group, found = all_ranks(world), []
    owned = Owned(sizes, group, torch.zeros(0))
    for turn in range(2 * TURNS):
        owned.flat.copy_(brought(sum(sizes), turn, group.rank))
        owned.start_sum(layer="gradients").wait()
        if turn % 2:
            owned.give_up()
            assert not owned.is_summed
            continue
        owned.outgoing.copy_(owned.mine)
        owned.start_hand_out(layer="parameters").wait()
        found.append(torch.cat(list(owned.pieces)))
    owned.give_up()  # of nothing
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_sum_that_nobody_uses_leaves_the_next_ones_alone(on_either, sizes):
    for found in on_either(len(sizes), given_up, sizes):
        for turn, handed_out in zip(range(0, 2 * TURNS, 2), found, strict=True):
            total = torch.zeros(sum(sizes))
            for each in range(len(sizes)):
                total += brought(sum(sizes), turn, each)
            assert torch.equal(handed_out, total)


def out_of_turn(world):
    owned = Owned((1, 1), all_ranks(world), torch.zeros(0))
    with pytest.raises(RuntimeError, match="once it has been summed"):
        owned.start_hand_out()
    owned.start_sum().wait()
    with pytest.raises(RuntimeError, match="must be handed out before"):
        owned.start_sum()
    owned.start_hand_out().wait()
    with pytest.raises(ValueError, match=r"2 sizes >= 0, one for each rank .*got \(1, 1, 1\)"):
        Owned((1, 1, 1), all_ranks(world), torch.zeros(0))


def test_refuses_what_is_out_of_turn(on_ranks):
    on_ranks(2, out_of_turn)
