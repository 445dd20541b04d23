"""The sharded tail in rounds: the same traffic as in one, less memory."""

from functools import partial

import pytest

from tests.train import rounds
from tests.train.exact import Case, check
from workbench.model.tracing.trace import trace
from workbench.plan.placement.rounds import ROUNDS
from workbench.plan.plans.plan import Plan

GRAPH = trace(rounds.Wide(), input_shape=rounds.Wide.shape)
D, OUTPUTS, BYTES = 32, 1024, 8


def wide(world, k, scheme, last="duplicate"):
    plan = Plan.data_parallel(GRAPH, world)
    for name in ("tail.0", "tail.2"):
        plan = plan.with_layer(name, scheme="shard_out", group_size=k)
    return plan.with_layer("tail.4", scheme=last, group_size=k).with_rounds(scheme)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("scheme", ROUNDS)
def test_traffic_is_that_of_the_formulas(on_ranks, scheme, k):
    """Received per rank, splitbrain.md section 6: (k-1) B D there and back, (k-1) B O a layer."""
    own = 8
    plan = wide(4, k, scheme)
    (ranks,) = check(on_ranks, [Case(rounds.Wide, plan, ((own,) * 4,))])
    calls = 1 if scheme == "BK" else k  # of every collective
    gather = k * (k - 1) if scheme == "B/K" else k - 1  # only one member sends in a round of "B"
    boundary = (k - 1) * own * D * BYTES
    features = (k - 1) * own * OUTPUTS * BYTES
    expected = [
        ("all_gather", "tail.0", "forward", gather, boundary),
        ("reduce_scatter", "tail.0", "backward", gather, boundary),
        ("all_gather", "tail.2", "forward", calls * (k - 1), features),
        ("reduce_scatter", "tail.2", "backward", calls * (k - 1), features),
        ("all_gather", "tail.4", "forward", calls * (k - 1), features),  # its consumer is whole
    ]
    for rank in ranks:
        found = [row for row in rank.traffic if row[1].startswith("tail")]
        assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_a_sender_sends_k_times_as_much_in_a_round_of_b_as_of_c(on_ranks):
    """Over Gloo, where the gather of a round starts before the round does."""
    k, own = 4, 8
    run = partial(on_ranks, 4, rounds.sent_in_rounds, shared_memory=False)
    b = run(wide(4, k, "B"), rounds.Wide, (own,) * 4)
    c = run(wide(4, k, "B/K"), rounds.Wide, (own,) * 4)
    for rank in range(4):
        size = own * D * BYTES
        assert b[rank] == [(int(t != rank), size * (t != rank)) for t in range(k)]
        assert c[rank] == [(k - 1, (k - 1) * size // k)] * k


@pytest.mark.slow
def test_a_round_needs_less_memory_than_all_rows(on_ranks):
    rows = (400,) * 4
    peak = {  # ranks do alike, but for buffers that gloo lets go later on some
        scheme: min(on_ranks(4, rounds.peak_of_a_step, wide(4, 4, scheme), rounds.Wide, rows))
        for scheme in ROUNDS
    }
    assert max(peak["B"], peak["B/K"]) < 0.7 * peak["BK"], peak


@pytest.mark.slow
def test_a_gather_of_the_input_itself(on_ranks):
    plan = Plan.data_parallel(GRAPH, 3)
    for name, scheme in {
        "head.0": "shard_out",
        "tail.0": "shard_in",
        "tail.2": "duplicate",
    }.items():
        plan = plan.with_layer(name, scheme=scheme)
    cases = [Case(rounds.Wide, plan.with_rounds(scheme), ((4, 1, 0),)) for scheme in ("B", "B/K")]
    check(on_ranks, cases)
