"""Shared memory: when it is used, and that nobody reads what is no longer, or not yet, there."""

import errno
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather, all_to_all, broadcast, reduce_scatter
from workbench.comm.groups import host
from workbench.comm.messages.errors import CommError
from workbench.comm.shared_memory import segment
from workbench.comm.shared_memory.meeting import SLOT_BYTES
from workbench.comm.shared_memory.segment import TURNS
from workbench.plan.placement.placement import Shard


def test_where_it_is_not_known_on_which_cores_all_are_taken(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert host._cores() == (0, 1, 2)


def transport(world):
    return all_ranks(world).transport


def test_is_used_where_it_can_be_and_is_wanted(on_ranks):
    assert on_ranks(3, transport) == ["shared memory"] * 3
    assert on_ranks(3, transport, shared_memory=False) == ["gloo"] * 3
    assert on_ranks(1, transport) == ["nothing"]


def check_all(group, shape, sizes, dtype, turn=0):
    """One of each collective, on whole numbers that are sums of few, against plain torch."""
    generator = torch.Generator().manual_seed(turn)
    for dim in range(len(shape)):
        cut, other = Shard(dim, sizes), Shard((dim + 1) % len(shape), sizes[::-1])
        extents = list(shape)
        extents[dim] = extents[other.dim] = sum(sizes)
        wholes = [torch.randint(0, 9, extents, generator=generator).to(dtype) for _ in group.ranks]
        whole, total = wholes[0], sum(wholes[1:], wholes[0])
        piece = whole.narrow(dim, *cut.span(group.rank))
        mine = wholes[group.rank]
        assert torch.equal(all_gather(piece, cut, group), whole)
        assert torch.equal(all_reduce(mine, group), total)
        root = turn % group.size
        assert torch.equal(broadcast(mine, root, group), wholes[root])
        part = total.narrow(dim, *cut.span(group.rank))
        assert torch.equal(reduce_scatter(mine, cut, group), part)
        if len(shape) > 1:
            moved = whole.narrow(other.dim, *other.span(group.rank))
            assert torch.equal(all_to_all(piece, cut, other, group), moved)
            assert torch.equal(all_to_all(moved, other, cut, group), piece)
        again = Shard(dim, (*sizes[1:], sizes[0]))
        moved = whole.narrow(dim, *again.span(group.rank))
        assert torch.equal(all_to_all(piece, cut, again, group), moved)


def large(world, sizes, shape):
    check_all(all_ranks(world), shape, sizes, torch.float32)


@pytest.mark.parametrize("sizes", [(1300, 0), (700, 1, 600), (400, 300, 200, 401)], ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (1, 1, 5)], ids=str)
def test_what_does_not_fit_into_a_slot_goes_in_portions(on_ranks, sizes, shape):
    assert sum(sizes) ** 2 * 4 > 2 * SLOT_BYTES
    on_ranks(len(sizes), large, sizes, shape)


def very_wide(world):
    group, n = all_ranks(world), SLOT_BYTES // 2
    sizes = (n + 1, 3, n - 7)  # of float64: one row of a piece is more than a slot
    check_all(group, (1,), sizes, torch.float64)
    cut = Shard(1, sizes)
    wholes = [torch.arange(2 * cut.extent).view(2, -1) % 7 * (r + 1) for r in range(3)]
    part = (6 * wholes[0]).narrow(1, *cut.span(group.rank))
    assert torch.equal(reduce_scatter(wholes[group.rank], cut, group), part)
    piece = wholes[0].narrow(1, *cut.span(group.rank))
    assert torch.equal(all_gather(piece, cut, group), wholes[0])


def test_rows_wider_than_a_slot(on_ranks):
    on_ranks(3, very_wide)


def in_inference_first(world):
    group = all_ranks(world)
    with torch.inference_mode():
        check_all(group, (3, 4), (2, 0, 1), torch.float32)
    check_all(group, (3, 4), (2, 0, 1), torch.float32)


def test_what_was_first_used_in_inference_mode_is_used_outside(on_either):
    """An evaluation may be the first to come with a number of rows that a later step has."""
    on_either(3, in_inference_first)


@st.composite
def sequences(draw):
    """Ranks, and for each turn: which group, shape, sizes, dtype."""
    ranks = draw(st.integers(1, 4))
    turn = st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.lists(st.sampled_from((0, 1, 2, 60)), min_size=ranks, max_size=ranks),
        st.sampled_from(["float64", "float32", "bfloat16", "float16", "int64", "uint8"]),
    )
    return ranks, draw(st.lists(turn, min_size=15, max_size=15))


def back_to_back(world, turns):
    everyone = tuple(range(world.size))
    specs = [("a", everyone), ("b", everyone[::-1]), ("c", everyone)]
    groups = list(world.groups(specs).values())
    for index, (which, shape, sizes, dtype) in enumerate(turns):
        check_all(groups[which], shape, tuple(sizes), getattr(torch, dtype), index)


@pytest.mark.slow
@settings(max_examples=10, derandomize=True, database=None)
@given(sequences())
def test_sequences_on_several_groups(on_either, drawn):
    ranks, turns = drawn
    on_either(ranks, back_to_back, turns)


def crowded(world):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(range(os.cpu_count()))})
        group, x = all_ranks(world), torch.ones(5)
        for _ in range(200):
            x = all_reduce(x, group) / world.size
        return x.tolist()
    finally:
        os.sched_setaffinity(0, before)


def test_more_ranks_than_cores(on_ranks):
    assert on_ranks(4, crowded) == [[1.0] * 5] * 4


def over_the_top(world):
    group = all_ranks(world)
    staging = group.staging
    staging.rounds.turn = TURNS - 5
    staging.rounds.come()
    world._watch.meet("all counts to be set", "")
    return [all_reduce(torch.tensor([i + world.rank]), group).item() for i in range(10)]


def test_counts_may_overflow(on_ranks):
    assert on_ranks(3, over_the_top) == [[3 * i + 3 for i in range(10)]] * 3


def at_odds(world, sizes_differ):
    group, x = all_ranks(world), torch.ones(4)
    calls = [lambda: all_reduce(x, group, layer="fc"), lambda: broadcast(x, 0, group, layer="fc")]
    if sizes_differ:
        calls = [lambda: all_reduce(x[: 3 + world.rank], group, layer="fc")] * 2
    with pytest.raises(CommError) as caught:
        calls[world.rank]()
    return str(caught.value)


@pytest.mark.parametrize("sizes_differ", [True, False])
def test_different_collectives_do_not_take_each_other_s_bytes(on_ranks, sizes_differ):
    answers = on_ranks(2, at_odds, sizes_differ)
    assert answers[0] == (
        "rank 0 came for all_reduce of layer 'fc' (call 1 of group world(0,1)), "
        "rank 1 for something else or with another size"
    )
    assert answers[1].endswith("rank 0 for something else or with another size")


def without(world, what):
    """Rank 1 has no memory, or cannot open that of others."""
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")

        def fail(*_args, **_keywords):
            raise OSError(errno.ENOSPC, "no space left on device")

        if world.rank == 1 and what == "memory":
            patch.setattr(os, "memfd_create", fail)
        if world.rank == 1 and what == "access":
            patch.setattr(segment.os, "stat", fail)
        group = all_ranks(world)
    total = all_reduce(torch.ones(2), group).tolist()
    return group.transport, total, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("memory", "no shared memory for ranks (0, 1, 2): [Errno 28] no space left on device"),
        ("access", "memory of ranks (0, 1, 2) could not be shared: [Errno 28] no space left"),
    ],
)
def test_gloo_takes_over_where_memory_cannot_be_shared(on_ranks, what, said):
    answers = on_ranks(3, without, what)
    assert [answer[:2] for answer in answers] == [("gloo", [3.0, 3.0])] * 3
    assert [len(answer[2]) for answer in answers] == [0, 1, 0]
    assert said in answers[1][2][0]


def on_hosts(world):
    group = all_ranks(world)
    return group.transport, group.link.hosts, all_reduce(torch.ones(2), group).tolist()


def test_ranks_share_the_memory_of_their_host(on_ranks):
    both = "shared memory within hosts, gloo across"
    found = on_ranks(3, on_hosts, hosts="aba")
    assert found == [(both, ((0, 2), (1,)), [3.0, 3.0])] * 3
    apart = on_ranks(3, on_hosts, hosts="abc")
    assert apart == [("gloo", ((0,), (1,), (2,)), [3.0, 3.0])] * 3


def buffer_without_memory(world):
    group = all_ranks(world)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError()))
        flat = group.buffer(4, torch.ones(1))
    return group.shared(flat) is None, flat.tolist()


def test_a_buffer_is_an_ordinary_tensor_where_there_is_no_memory(on_ranks):
    assert on_ranks(2, buffer_without_memory) == [(True, [0.0] * 4)] * 2
