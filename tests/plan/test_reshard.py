"""What changes hands between two plans: everything that is lacked, once, and nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from tests.plan.graphs import Builder
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Replicate, Shard
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Move, Reshard, held, replica_after


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


@pytest.mark.slow
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


def test_a_move_is_as_large_as_its_region():
    assert Move("w", ((1, 4), (0, 6), (2, 3)), 0, 1).numel == 18
    assert Move("w", (), 0, 1).numel == 1


@pytest.mark.parametrize(
    ("region", "numel", "parts"),
    [
        (((0, 4), (0, 6)), 24, [((0, 4), (0, 6))]),
        (((0, 4), (0, 6)), 12, [((0, 2), (0, 6)), ((2, 4), (0, 6))]),
        (((1, 4), (0, 6)), 12, [((1, 3), (0, 6)), ((3, 4), (0, 6))]),
        (((2, 3), (1, 6)), 2, [((2, 3), (1, 3)), ((2, 3), (3, 5)), ((2, 3), (5, 6))]),
        (((0, 1), (0, 2), (5, 6)), 1, [((0, 1), (0, 1), (5, 6)), ((0, 1), (1, 2), (5, 6))]),
        (
            ((0, 2), (0, 5)),
            3,
            [((row, row + 1), span) for row in (0, 1) for span in ((0, 3), (3, 5))],
        ),
    ],
)
def test_the_first_dimension_that_has_several_is_parted(region, numel, parts):
    assert list(Move("w", region, 2, 3).parts(numel)) == [Move("w", one, 2, 3) for one in parts]


def test_each_replica_holds_its_pieces_of_every_block():
    cut = WeightPlacement(Shard(1, (1, 2), blocks=2), 2, (4, 6), "float32", trainable=True)
    assert held(cut, 0) == held(cut, 2) == (((0, 4), (0, 1)), ((0, 4), (3, 4)))
    assert held(cut, 3) == (((0, 4), (1, 3)), ((0, 4), (4, 6)))
    assert held(cut, 3, replica=1) == held(cut, 3)
    assert held(cut, 3, replica=0) == held(cut, 1, replica=1) == ()
    none = WeightPlacement(Shard(0, (4, 0)), 2, (4, 6), "float32", trainable=True)
    assert (held(none, 0), held(none, 1)) == ((((0, 4), (0, 6)),), ())
    whole = WeightPlacement(Replicate(), 2, (4, 6), "float32", trainable=True)
    assert held(whole, 1) == (((0, 4), (0, 6)),)


@pytest.mark.parametrize(
    ("k", "replica", "after"), [(1, 3, 3), (2, 3, 1), (2, 2, 0), (4, 3, 0), (2, None, None)]
)
def test_a_replica_goes_on_as_the_one_of_its_number_or_modulo_their_count(k, replica, after):
    new = WeightPlacement(Replicate(), k, (4,), "float32", trainable=True)
    assert replica_after(new, 4, replica) == after


def halves(k, world=4):
    """A layer of four outputs and two inputs, a norm of its outputs, and a layer for all ranks."""
    graph = Builder((2,)).linear("a", 4).norm("bn").linear("b", 2).graph()
    return Plan(graph, world, {} if k == 1 else {"a": LayerPlan("shard_out", k)})


UPPER, LOWER = (0, 2), (2, 4)


def test_moves_are_those_of_cells_from_who_has_sent_least_and_is_near():
    moves = Reshard(halves(2), halves(1)).moves
    weight = [(one.region, one.source, one.target) for one in moves if one.name == "a.weight"]
    assert weight == [
        ((UPPER, (0, 2)), 0, 1),
        ((UPPER, (0, 2)), 2, 3),
        ((LOWER, (0, 2)), 1, 0),
        ((LOWER, (0, 2)), 3, 2),
    ]
    assert [one.name for one in moves[4:]] == [
        name for name in ("a.bias", "bn.weight", "bn.running_mean") for _ in range(4)
    ]
    assert moves[4:8] == (
        Move("a.bias", (UPPER,), 0, 1),
        Move("a.bias", (UPPER,), 2, 3),
        Move("a.bias", (LOWER,), 1, 0),
        Move("a.bias", (LOWER,), 3, 2),
    )


def test_a_rank_keeps_what_it_holds():
    assert Reshard(halves(1), halves(2)).moves == ()
    assert Reshard(halves(2), halves(2)).moves == ()


def test_a_rank_receives_its_weights_and_what_is_placed_like_them():
    there = Reshard(halves(2), halves(1))
    assert [there.received(rank, {}) for rank in range(4)] == [4 + 2 + 2 + 2] * 4
    assert there.received(0, {"a.weight": 2, "a.bias": 1}) == 3 * 4 + 2 * 2 + 2 + 2


def test_residuals_go_to_the_replica_of_the_same_number():
    """Of two replicas, ranks 0 and 1 go on with the first one's and the second one's."""
    there = Reshard(halves(2), halves(1))
    assert there.residual_moves("a.bias", 0) == (Move("a.bias", (LOWER,), 1, 0),)
    assert there.residual_moves("a.bias", 1) == (
        Move("a.bias", (UPPER,), 2, 1),
        Move("a.bias", (LOWER,), 3, 1),
    )
    assert [there.received(rank, {}, residuals=3) - 10 for rank in range(4)] == [
        3 * (4 + 2 + 2),
        3 * (8 + 4 + 4),
        0,
        0,
    ]


def test_residuals_of_more_replicas_than_there_are_go_on_modulo_their_count():
    there = Reshard(halves(1), halves(2))
    assert there.residual_moves("a.bias", 0) == (Move("a.bias", (LOWER,), 0, 1),)
    assert there.residual_moves("a.bias", 1) == (
        Move("a.bias", (UPPER,), 1, 2),
        Move("a.bias", (LOWER,), 1, 3),
    )
    assert there.residual_moves("a.bias", 3) == (Move("a.bias", (UPPER,), 3, 2),)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [(2, 1, True), (1, 2, True), (2, 4, False), (4, 2, None), (4, 4, None)],
)
def test_residuals_are_kept_where_gradients_are_reduced_before_and_after(before, after, kept):
    there = Reshard(halves(before), halves(after))
    assert there.residuals_kept("a.weight") is kept
    if not kept:
        without = [there.received(rank, {}) for rank in range(4)]
        names = [name for name in there.before.flow.weights if there.residuals_kept(name)]
        assert names == ["b.weight", "b.bias"]  # which stay where they are
        assert [there.received(rank, {}, residuals=1) for rank in range(4)] == without


def test_another_model_or_world_is_refused():
    plan = Plan.data_parallel(GRAPHS[nets.Images], 2)
    with pytest.raises(PlanError, match="cannot go on as"):
        Reshard(plan, Plan.data_parallel(GRAPHS[nets.Tokens], 2))
    with pytest.raises(PlanError, match="2 ranks cannot go on on 3"):
        Reshard(plan, Plan.data_parallel(GRAPHS[nets.Images], 3))
