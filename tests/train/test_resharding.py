"""Pieces that change hands: every rank has its new ones, and receives what was foreseen."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from tests.plan.graphs import mlp
from workbench.comm.groups.group import Group
from workbench.comm.messages.errors import CommError
from workbench.comm.messages.recorder import Recorder
from workbench.comm.parts import exchange_parts
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard
from workbench.train.run import reshard as resharding
from workbench.train.run.reshard import Entry, Pieces, move_pieces


def whole(entry, placed):
    """A tensor that says where each of its elements belongs."""
    count = torch.Size(placed.shape).numel()
    seed = sum(map(ord, entry.key)) % 50
    return (torch.arange(count).view(placed.shape) * 3 + seed).to(entry.dtype)


def piece(entry, placed, rank):
    tensor = whole(entry, placed)
    if not isinstance(placed.placement, Shard):
        return tensor
    spans = placed.placement.spans(rank % placed.group_size)
    return torch.cat(
        [tensor.narrow(placed.placement.dim, *span) for span in spans], placed.placement.dim
    )


def entries_of(plan):
    dtypes = {"float32": torch.float32, "int64": torch.int64}
    found = []
    for name, placed in plan.flow.weights.items():
        found.append(Entry(name, name, dtypes[placed.dtype]))
        if placed.trainable:
            found.append(Entry(f"momentum/{name}", name, torch.float64))
    return found


def moved(world, pairs):
    """What each rank has after each of the re-cuts, and the elements that it received."""
    everyone = world.groups([("control", tuple(range(world.size)))])
    (everyone,) = everyone.values()
    found = []
    for before, after in pairs:
        entries = entries_of(before)
        own = {e.key: piece(e, before.flow.weights[e.weight], world.rank) for e in entries}
        records = sum(row.bytes for row in world.recorder.rows())
        pieces = move_pieces(Reshard(before, after), entries, own, everyone)
        found.append((pieces, sum(row.bytes for row in world.recorder.rows()) - records))
    return found


def check(run, pairs):
    for rank, found in enumerate(run(pairs[0][0].world_size, moved, pairs)):
        for (before, after), (pieces, received) in zip(pairs, found, strict=True):
            moves = [m for m in Reshard(before, after).moves if m.target == rank]
            expected = 0
            for entry in entries_of(before):
                assert torch.equal(
                    pieces[entry.key], piece(entry, after.flow.weights[entry.weight], rank)
                ), entry
                own = sum(m.numel for m in moves if m.name == entry.weight)
                expected += own * entry.dtype.itemsize
            assert received == expected


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(
    max_examples=2,
    phases=[Phase.generate],
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_any_plan_becomes_any_other(on_either, world, data):
    pairs = []
    for net in (nets.Images, nets.Residual, nets.Tokens):
        drawn = plans(net, world)
        pairs += [(data.draw(drawn)[0], data.draw(drawn)[0]) for _ in range(3)]
    check(on_either, pairs)


def test_shares_shift_and_layers_are_made_whole(on_ranks):
    graph = GRAPHS[nets.Images]
    hybrid = Plan.hybrid(graph, 3)
    shifted = hybrid.with_layer("head.0", scheme="shard_out", shares=(3, 0, 1))
    whole_, filters = Plan.data_parallel(graph, 3), Plan.filters(graph, 3, (8, 0, 3), grain=1)
    tokens = GRAPHS[nets.Tokens]
    heads = Plan.hybrid(tokens, 3), Plan.filters(tokens, 3, (2, 1, 1), grain=1)
    check(on_ranks, [(hybrid, shifted), (shifted, whole_), (whole_, filters), (filters, hybrid)])
    check(on_ranks, [heads, heads[::-1]])


def test_a_piece_is_handed_over_once_and_what_lies_alike_stays_where_it_is():
    plan = Plan.data_parallel(mlp(3, 2), 1)
    held = {"fc0.bias": torch.ones(2), "fc0.weight": torch.zeros(2, 3)}
    pieces, bias = Pieces(plan.flow.weights, held), held["fc0.bias"]
    assert (pieces.names, pieces.shape("fc0.weight")) == (("fc0.bias", "fc0.weight"), (2, 3))
    assert pieces.read("fc0.bias") is bias
    assert list(held) == ["fc0.weight"]
    entries = [Entry("b", "fc0.bias", torch.float32), Entry("none", "fc0.weight", torch.float64)]
    everyone = Group("everyone", (0,), 0, Recorder())
    found = move_pieces(Reshard(plan, plan), entries, {"b": bias}, everyone)
    assert found["b"] is bias
    assert (found["none"].shape, found["none"].dtype) == ((2, 3), torch.float64)


def failed(world, before, after):
    """Whether this rank's pieces are as they were when an exchange fails half-way."""
    everyone = world.groups([("control", tuple(range(world.size)))])
    (everyone,) = everyone.values()
    entries = entries_of(before)
    own = {e.key: piece(e, before.flow.weights[e.weight], world.rank) for e in entries}
    copies, times = {key: tensor.clone() for key, tensor in own.items()}, itertools.count()

    def fails(*args, **keywords):
        if next(times) == 1:
            raise CommError("a rank is gone")
        return exchange_parts(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "exchange_parts", fails)
        with pytest.raises(CommError, match="is gone"):
            move_pieces(Reshard(before, after), entries, own, everyone)
    return all(torch.equal(own[key], copies[key]) for key in own)


def test_a_re_cut_that_fails_leaves_the_old_pieces_as_they_were(on_ranks):
    graph = GRAPHS[nets.Images]
    before, after = Plan.hybrid(graph, 3), Plan.filters(graph, 3, (8, 0, 3), grain=1)
    assert on_ranks(3, failed, before, after) == [True] * 3
