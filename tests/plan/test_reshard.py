"""What changes hands between two plans: everything that is lacked, once, and nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from workbench.plan.errors import PlanError
from workbench.plan.plan import Plan
from workbench.plan.reshard import Move, Reshard, held


@st.composite
def pairs(draw):
    net = draw(st.sampled_from(nets.NETS))
    before, _ = draw(plans(net))
    after, _ = draw(plans(net, before.world_size))
    return before, after


def painted(placed, rank):
    """How often a rank holds each element."""
    count = np.zeros(placed.shape, dtype=np.int64)
    for region in held(placed, rank):
        count[tuple(slice(*span) for span in region)] += 1
    return count


@given(pairs())
def test_every_rank_has_its_new_pieces_and_is_sent_nothing_twice(pair):
    reshard = Reshard(*pair)
    for name, old in reshard.before.flow.weights.items():
        new = reshard.after.flow.weights[name]
        for rank in range(reshard.before.world_size):
            had, wants = painted(old, rank), painted(new, rank)
            assert had.sum() == old.piece_numel(rank)
            came = np.zeros_like(had)
            for move in reshard.moves:
                if move.name == name and move.target == rank:
                    place = tuple(slice(*span) for span in move.region)
                    assert painted(old, move.source)[place].all()
                    came[place] += 1
            assert np.array_equal(came, wants * (had == 0))


def test_only_what_is_lacked_travels():
    graph = GRAPHS[nets.Images]
    whole, halves = Plan.data_parallel(graph, 2), Plan.hybrid(graph, 2)
    assert Reshard(whole, halves).moves == ()
    back = Reshard(halves, whole)
    assert back.received(0, {}) == graph.parameters - halves.parameters_of(0)
    twice = dict.fromkeys(graph.trainable, 2)
    assert back.received(1, twice) == 3 * (graph.parameters - halves.parameters_of(1))


def test_a_border_that_shifts_moves_what_lies_between():
    graph = GRAPHS[nets.Images]
    before = Plan.hybrid(graph, 2).with_layer("head.0", scheme="shard_out", shares=(5, 5))
    after = before.with_layer("head.0", shares=(7, 3))
    moves = {move.name: move for move in Reshard(before, after).moves}
    assert moves["head.0.weight"].region == ((5, 7), (0, 63))
    assert (moves["head.0.weight"].source, moves["head.0.weight"].target) == (1, 0)


@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 7), st.integers(1, 9))
def test_large_moves_are_parted(numel, first, rows, columns):
    move = Move("w", ((first, first + rows), (2, 2 + columns)), 0, 1)
    parts = list(move.parts(numel))
    assert sum(part.numel for part in parts) == move.numel
    assert all(part.numel <= numel for part in parts)
    seen = np.zeros((first + rows, 2 + columns), dtype=int)
    for part in parts:
        seen[tuple(slice(*span) for span in part.region)] += 1
    assert np.array_equal(seen[first:, 2:], np.ones((rows, columns)))


def test_holders_send_about_alike():
    graph = GRAPHS[nets.Images]
    before = Plan.hybrid(graph, 4, 2)
    sent = Counter()
    for move in Reshard(before, Plan.data_parallel(graph, 4)).moves:
        sent[move.source] += move.numel
    assert max(sent.values()) <= 2 * min(sent.values())


def test_another_model_or_world_is_refused():
    plan = Plan.data_parallel(GRAPHS[nets.Images], 2)
    with pytest.raises(PlanError, match="cannot go on as"):
        Reshard(plan, Plan.data_parallel(GRAPHS[nets.Tokens], 2))
    with pytest.raises(PlanError, match="2 ranks cannot go on on 3"):
        Reshard(plan, Plan.data_parallel(GRAPHS[nets.Images], 3))
