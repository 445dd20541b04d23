"""The sharded tail in rounds: the same values as in one, less memory, the same traffic."""

from functools import partial

import pytest
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.layers import nets
from tests.layers.drawn import shares
from tests.train import rounds
from workbench.model.trace import trace
from workbench.plan.placement import Shard, apportion
from workbench.plan.plan import Plan
from workbench.plan.tail import ROUNDS

NETS = (rounds.Picture, rounds.Wide)
GRAPHS = {net: trace(net(), input_shape=net.shape) for net in NETS}
TAILS = {
    rounds.Picture: ("head.1", "head.4", "head.7"),
    rounds.Wide: ("tail.0", "tail.2", "tail.4"),
}


def whole(net, plan, count):
    model = nets.made(net)
    rounds.masks(net, plan, model, count)
    images, labels = nets.batch(net, count)
    outputs = model(images)
    loss = F.cross_entropy(outputs, labels)
    loss.backward()
    return outputs.detach(), loss.item(), {name: p.grad for name, p in model.named_parameters()}


def check(on_ranks, net, plan, rows):
    outputs, loss, gradients = whole(net, plan, sum(rows))
    answers = on_ranks(plan.world_size, rounds.one_step, plan, net, rows)
    assert sum(answer[1] for answer in answers) == pytest.approx(loss, rel=1e-12)
    for rank, (mine, _, found, _) in enumerate(answers):
        assert_close(mine, outputs.narrow(0, *Shard(0, rows).span(rank)), rtol=1e-10, atol=1e-12)
        for name, got in found.items():
            expected = nets.piece_of(plan, name, gradients[name], rank)
            assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert set(found) == set(gradients)
    return answers


@st.composite
def cases(draw):
    """Schemes and shares of every layer of the tail, over one group size; rows of any sizes."""
    world = draw(st.integers(1, 4))
    k = draw(st.sampled_from([k for k in range(1, world + 1) if world % k == 0]))
    plan = Plan.data_parallel(GRAPHS[rounds.Picture], world).with_batch_norm("synchronized")
    last = draw(st.sampled_from(["duplicate", "shard_out", "shard_in", "replicate"]))
    for name in TAILS[rounds.Picture]:
        scheme = draw(st.sampled_from(["shard_out", "shard_in", "duplicate"]))
        scheme = last if name == "head.7" else scheme
        by = draw(st.none() | shares(k)) if scheme.startswith("shard") else None
        size = 1 if scheme == "replicate" else k
        plan = plan.with_layer(name, scheme=scheme, group_size=size, shares=by)
    count = draw(st.integers(1, 9))
    rows = apportion(count, draw(shares(world)))
    return plan.with_rounds(draw(st.sampled_from(ROUNDS))), rows


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_any_rounds_of_any_rows(on_either, case):
    check(on_either, rounds.Picture, *case)


D, OUTPUTS, BYTES = 32, 1024, 8


def wide(world, k, scheme, last="duplicate"):
    plan = Plan.data_parallel(GRAPHS[rounds.Wide], world)
    for name in ("tail.0", "tail.2"):
        plan = plan.with_layer(name, scheme="shard_out", group_size=k)
    return plan.with_layer("tail.4", scheme=last, group_size=k).with_rounds(scheme)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("scheme", ROUNDS)
def test_traffic_is_that_of_the_formulas(on_ranks, scheme, k):
    """Received per rank, splitbrain.md section 6: (k-1) B D there and back, (k-1) B O a layer."""
    own = 8
    plan = wide(4, k, scheme)
    answers = check(on_ranks, rounds.Wide, plan, (own,) * 4)
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
    for *_, traffic in answers:
        found = [row for row in traffic if row[1].startswith("tail")]
        assert sorted(found) == sorted(expected)


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


def test_a_round_needs_less_memory_than_all_rows(on_ranks):
    rows = (400,) * 4
    peak = {  # ranks do alike, but for buffers that gloo lets go later on some
        scheme: min(on_ranks(4, rounds.peak_of_a_step, wide(4, 4, scheme), rounds.Wide, rows))
        for scheme in ROUNDS
    }
    assert max(peak["B"], peak["B/K"]) < 0.7 * peak["BK"], peak


def test_a_gather_of_the_input_itself(on_ranks):
    plan = Plan.data_parallel(GRAPHS[rounds.Wide], 3)
    for name, scheme in {
        "head.0": "shard_out",
        "tail.0": "shard_in",
        "tail.2": "duplicate",
    }.items():
        plan = plan.with_layer(name, scheme=scheme)
    for scheme in ("B", "B/K"):
        check(on_ranks, rounds.Wide, plan.with_rounds(scheme), (4, 1, 0))
