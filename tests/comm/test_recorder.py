"""The record against formulas written down independently of the collectives."""

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather, all_to_all, broadcast, reduce_scatter
from workbench.comm.messages.recorder import Record, Recorder, RecordKey
from workbench.comm.regions import copy_to, gather_from
from workbench.plan.placement.placement import Shard, apportion

ROWS = 3


def one_of_each(world, sizes):
    group, rank = all_ranks(world), world.rank
    shard, other = Shard(1, sizes), Shard(0, apportion(ROWS, (1,) * world.size))
    whole = torch.ones(ROWS, shard.extent, dtype=torch.float64)
    piece = whole[:, : sizes[rank]]
    all_gather(piece, shard, group, layer="a")
    all_gather(piece, shard, group, layer="a")
    reduce_scatter(whole, shard, group, layer="b", phase="forward")
    all_to_all(piece, shard, other, group, layer="c")
    all_reduce(whole, group)
    broadcast(whole, 0, group)
    start_all_reduce(whole.view(-1), group, layer="bucket").wait()
    rows = world.recorder.rows()
    assert world.recorder.blocked_s == pytest.approx(sum(row.seconds for row in rows))
    assert all(row.seconds > 0 for row in rows) or world.size == 1
    world.recorder.reset()
    assert (world.recorder.rows(), world.recorder.blocked_s) == ([], 0.0)
    return [(*r.counts[1:], r.rounds, r.additions) for r in rows]


def received(pieces, rank):
    """(messages, bytes) of float64 pieces that come from other ranks."""
    others = [n for r, n in enumerate(pieces) if r != rank and n > 0]
    return len(others), 8 * sum(others)


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (1, 4, 2), (5, 0, 1), (0, 0, 4, 0)], ids=str)
def test_counts_what_the_formulas_say(on_either, sizes):
    k, extent = len(sizes), sum(sizes)
    rows = apportion(ROWS, (1,) * k)
    segments = apportion(ROWS * extent, (1,) * k)
    for rank, got in enumerate(on_either(k, one_of_each, sizes)):
        gather = received([ROWS * n for n in sizes], rank)
        scatter = received([ROWS * sizes[rank]] * k, rank)
        swap = received([rows[rank] * n for n in sizes], rank)
        halves = received([segments[rank]] * k, rank), received(segments, rank)
        reduce = tuple(map(sum, zip(*halves, strict=True)))
        once, added = int(k > 1), [(k - 1) * n for n in (ROWS * sizes[rank], segments[rank])]
        whole = received([ROWS * extent] + [0] * (k - 1), rank)
        assert got == [
            ("all_gather", "a", "step", 2, 2 * gather[0], 2 * gather[1], 2 * once, 0),
            ("reduce_scatter", "b", "forward", 1, *scatter, once, added[0]),
            ("all_to_all", "c", "step", 1, *swap, once, 0),
            ("all_reduce", "", "step", 1, *reduce, 2 * once, added[1]),
            ("broadcast", "", "step", 1, *whole, once, 0),
            ("all_reduce", "bucket", "step", 1, *reduce, 2 * once, added[1]),
        ]


def a_layer(world):
    group, shard = all_ranks(world, "shard"), Shard(0, (1, 1))
    x = torch.ones(1, 3, requires_grad=True)
    gather_from(copy_to(x, group, layer="fc"), shard, group, layer="fc").sum().backward()
    return [(r.group, r.op, r.layer, r.phase) for r in world.recorder.rows()]


def test_crossings_say_their_layer_and_phase(on_either):
    for rows in on_either(2, a_layer):
        assert rows == [
            ("shard(0,1)", "all_gather", "fc", "forward"),
            ("shard(0,1)", "all_reduce", "fc", "backward"),
        ]


def test_rows_add_up():
    recorder = Recorder()
    key = RecordKey("g", "all_gather", "fc", "forward")
    recorder.add(key, calls=1, messages=2, bytes=30, rounds=2)
    recorder.add(key._replace(phase="backward"), calls=1)
    recorder.add(key, calls=1, messages=1, bytes=10, seconds=0.5, rounds=3, additions=5)
    assert recorder.rows() == [
        Record("g", "all_gather", "fc", "forward", 2, 3, 40, 0.5, 5, 5),
        Record("g", "all_gather", "fc", "backward", 1, 0, 0, 0.0, 0, 0),
    ]
    recorder.add(key, seconds=0.25)
    assert (recorder.blocked_s, recorder.received_bytes) == (0.75, 40)
    recorder.reset()
    assert (recorder.blocked_s, recorder.received_bytes, recorder.rows()) == (0.0, 0, [])
