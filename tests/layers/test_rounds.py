"""Which rows a round has, and how the rounds' rows become one batch again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.layers import nets
from workbench.layers.local.context import BatchContext
from workbench.layers.local.draws import PlacedDropout
from workbench.layers.rounds import PartedModel, joined, rounds_of
from workbench.model.tracing.trace import trace
from workbench.plan.placement.placement import Layout, Replicate
from workbench.plan.placement.rounds import ROUNDS, round_rows
from workbench.plan.plans.plan import Plan

ROWS = st.lists(st.integers(0, 5), min_size=4, max_size=4).map(tuple)

SETTINGS = settings(derandomize=True, database=None)


def group_of(rank, k):
    first = rank - rank % k
    return range(first, first + k)


@SETTINGS
@given(ROWS, st.sampled_from([1, 2, 4]), st.sampled_from(ROUNDS), st.integers(0, 3))
def test_rounds_join_to_the_group_s_rows(rows, k, scheme, rank):
    """Rows of two elements a sample, from a batch that begins at row 7."""
    ranks = group_of(rank, k)
    rounds = list(rounds_of(round_rows(scheme, rows, k), 7, rank))
    context = BatchContext(rank, (0,) * 4)
    parts = []
    for brought in rounds:
        context.set(brought.rows, starts=brought.starts)
        parts.append(context.indices(k, 2))
    whole = BatchContext(rank, rows, first_row=7).indices(k, 2)
    first = 7 + sum(rows[: ranks[0]])
    assert whole.tolist() == list(range(2 * first, 2 * (first + sum(rows[r] for r in ranks))))
    assert joined(parts, rounds, ranks, 2).tolist() == whole.tolist()
    assert [brought.last for brought in rounds] == [False] * (len(rounds) - 1) + [True]


@SETTINGS
@given(ROWS, st.sampled_from(["B", "B/K"]))
def test_a_round_drops_what_the_whole_batch_drops(rows, scheme):
    context = BatchContext(2, rows, seed=3)
    layer = PlacedDropout(0.5, Layout(2, Replicate()), (6,), 1, "drop", context)
    whole = layer(torch.ones(rows[2] + rows[3], 6))
    rounds, parts = list(rounds_of(round_rows(scheme, rows, 2), 0, 2)), []
    for brought in rounds:
        context.set(brought.rows, starts=brought.starts)
        parts.append(layer(torch.ones(brought.rows[2] + brought.rows[3], 6)))
    assert_close(joined(parts, rounds, range(2, 4), 1), whole)


def parted(world, plan):
    model = nets.cut_net(world, plan, nets.Images, (2, 1))
    halves = PartedModel(model, plan.tail)
    images, _ = nets.batch(nets.Images, 3)
    mine = images[:2] if world.rank == 0 else images[2:]
    with torch.no_grad():
        model.eval()
        both = halves.compute_tail(halves.compute_head(mine))
        whole = model(mine)
    shares = {id(p) for p in model.traced.parameters()}
    parameters = [*halves.compute_head.parameters(), *halves.compute_tail.parameters()]
    owns = [p for p in parameters if id(p) not in shares]
    return both, whole, len(owns), halves.compute_head.code, halves.compute_tail.code


def test_head_and_tail_are_the_model_and_own_nothing(on_ranks):
    graph = trace(nets.Images(), input_shape=nets.Images.shape)
    for both, whole, owned, head, tail in on_ranks(2, parted, Plan.hybrid(graph, 2)):
        assert_close(both, whole)
        assert owned == 0
        assert "all_gather" not in head
        assert "features" in head
        assert tail.index("all_gather_rows") < tail.index("head")
