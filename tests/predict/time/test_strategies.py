"""Strategies in time, against the closed forms of Pipe-SGD (arXiv:1811.03619, sec. 4)."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.predict.machines import device, link, machine
from workbench.plan.experiment.experiment import ParameterServer, Pipelined
from workbench.plan.machine.device import BY_BACKEND, EXCHANGE, INTO_NEW, Curve
from workbench.plan.plans.plan import Plan

WHOLE = 2**40
ROOTED = ("reduce", "broadcast")
ONE = graphs.Builder((1000,)).linear("fc", 500).graph()
BYTES, ROW_S, UPDATE = 2_002_000, 2e-3, 1e-9  # of the gradient; both ways; a byte of parameters
ALPHA, GAMMA = 1e-5, 2e-10


def step_time(sync, bandwidth=1e9, ranks=4, rows=1, **fields):
    plan = Plan.data_parallel(ONE, ranks)
    run = wb.Experiment(
        plan=plan,
        data="digits",
        optimizer=wb.SGD(lr=0.1),
        steps=1,
        batch_size=ranks * rows,
        sync=sync,
    )
    toy = device(update_s_per_byte={"sgd": UPDATE})
    wire = link(latency_s=ALPHA, bandwidth=bandwidth, reduction_s_per_byte=GAMMA, **fields)
    return wb.predict(plan, machine(toy, within=wire), run)


def status(bandwidth, ranks=4):
    """A direct sum of 3 + p numbers of 8 bytes."""
    share = (3 + ranks) * 8 * (ranks - 1) / ranks
    return 2 * ALPHA + 2 * share / bandwidth + share * GAMMA


def sum_s(bandwidth, ranks=4, rounds=2):
    share = BYTES * (ranks - 1) / ranks
    return rounds * ALPHA + 2 * share / bandwidth + share * GAMMA


@pytest.mark.parametrize(
    ("algorithm", "rounds"), [("direct", 2), ("ring", 6), ("halving_doubling", 4)]
)
def test_synchronous_is_the_sum(algorithm, rounds):
    sync = wb.Synchronous(algorithm=algorithm, bucket_bytes=WHOLE)
    expected = UPDATE * BYTES + ROW_S + sum_s(1e9, rounds=rounds) + status(1e9)
    assert step_time(sync).step_time == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bandwidth", [2e8, 1e9, 1e10])
@pytest.mark.parametrize("width", [2, 3])
def test_pipelined_is_the_slower_of_both(width, bandwidth):
    """max(l_up + l_comp, l_comm), whatever the width; the status is a part of a step."""
    prediction = step_time(Pipelined(width=width), bandwidth)
    compute = UPDATE * BYTES + ROW_S + status(bandwidth)
    expected = max(compute, sum_s(bandwidth))
    assert prediction.step_time == pytest.approx(expected, rel=1e-6)
    waits = [s for s in prediction.timeline.spans(0) if s.what == "wait" and s.lane == "compute"]
    assert bool(waits) == (sum_s(bandwidth) > compute)


def test_width_one_is_synchronous():
    assert step_time(Pipelined(width=1)).step_time == step_time(wb.Synchronous()).step_time


def test_a_parameter_server():
    """2 alpha + 2 (p-1) n beta + (p-1) n gamma, and the server's update."""
    prediction = step_time(ParameterServer(server=1, bucket_bytes=WHOLE))
    exchange = 2 * ALPHA + 2 * 3 * BYTES * 1e-9 + 3 * BYTES * GAMMA
    expected = ROW_S + exchange + UPDATE * BYTES + status(1e9)
    assert prediction.step_time == pytest.approx(expected, rel=1e-9)
    assert [rank["update"] > 0 for rank in prediction.breakdown] == [False, True, False, False]
    received = {s.op: s.bytes for s in prediction.timeline.spans(1) if s.op in ROOTED}
    assert received == {"reduce": 3 * BYTES, "broadcast": 0}
    received = {s.op: s.bytes for s in prediction.timeline.spans(0) if s.op in ROOTED}
    assert received == {"reduce": 0, "broadcast": BYTES}


def test_the_server_is_not_left_out_of_many():
    there = step_time(ParameterServer(server=3)).at(world_size=4096, batch_size=4096)
    assert there.breakdown[3]["update"] > 0 == there.breakdown[2]["update"]


@pytest.mark.parametrize(("codec", "part"), [("bf16", 1 / 2), ("int8", 1 / 4)])
def test_codecs_make_sums_shorter(codec, part):
    slow = 1e7  # bytes a second
    plain, coded = (
        step_time(wb.Synchronous(codec=c, bucket_bytes=WHOLE), slow) for c in (None, codec)
    )
    shorter = (coded.step_time - ROW_S) / (plain.step_time - ROW_S)
    assert shorter == pytest.approx(part, rel=0.05)
    (name,) = coded.simulation.algorithms["gradients"]
    assert name == f"direct with {codec}"


def test_what_was_measured_is_what_ranks_take_of_themselves():
    """A link's curve is of "auto", which is "direct" where ranks share memory."""
    curve = Curve(op="all_reduce", ranks=4, points=((0.0, 0.5), (1e9, 0.5)))
    auto, direct, ring = (
        step_time(wb.Synchronous(algorithm=name, bucket_bytes=WHOLE), curves=(curve,)).step_time
        for name in ("auto", "direct", "ring")
    )
    assert auto == direct > 1.0  # the sum and the status
    assert 0.5 < ring < 0.6


def test_other_algorithms_are_made_of_exchanges_that_were_measured():
    """Of 4 ranks a ring exchanges a quarter 6 times, and adds up 3 of them."""
    measured = Curve(op=EXCHANGE, ranks=4, points=((0.0, 0.5), (BYTES, 1.5)))
    sync = wb.Synchronous(algorithm="ring", bucket_bytes=WHOLE)
    found = step_time(sync, curves=(measured,)).step_time
    rest = UPDATE * BYTES + ROW_S + status(1e9)
    assert found - rest == pytest.approx(6 * 0.75 + 3 / 4 * BYTES * GAMMA, rel=1e-9)


def test_a_server_takes_what_copies_from_it_took():
    """Of 4 ranks 3 receive all, three quarters of it in the mean; it adds up three others'."""
    measured = Curve(op="broadcast", ranks=4, points=((0.0, 0.5), (BYTES, 1.5)))
    sync = ParameterServer(bucket_bytes=WHOLE)
    found = step_time(sync, curves=(measured,)).step_time
    rest = UPDATE * BYTES + ROW_S + status(1e9)
    assert found - rest == pytest.approx(2 * 1.25 + 3 * BYTES * GAMMA, rel=1e-9)


def test_parameters_are_averaged_as_the_backend_was_measured():
    measured = Curve(op=BY_BACKEND, ranks=4, points=((0.0, 0.5), (1e9, 0.5)))
    found = step_time(wb.LocalSGD(every=1), curves=(measured,))
    sums = {s.label: s.seconds for s in found.timeline.spans(0) if s.op == "all_reduce"}
    assert sums["parameters"] == pytest.approx(0.5)
    assert found.simulation.algorithms["parameters"] == ("backend",)


def test_coding_takes_what_was_measured():
    """Of 4 ranks each encodes 5 quarters and decodes 6, where both at once take a second a byte."""
    sync, plan = wb.Synchronous(codec="int8", bucket_bytes=WHOLE), Plan.data_parallel(ONE, 4)
    run = wb.Experiment(
        plan=plan, data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=4, sync=sync
    )
    plain, coding = (
        wb.predict(plan, machine(device(coding_s_per_byte={"int8": rate})), run).step_time
        for rate in (0.0, 1.0)
    )
    assert coding - plain == pytest.approx(BYTES * (5 + 6) / 4 / 2, rel=1e-6)


def test_sums_into_new_memory_have_a_curve_of_their_own():
    """Of activations, and the status; gradients are summed where they lie."""
    slow = Curve(op=INTO_NEW, ranks=4, points=((1.0, 3.0), (2e9, 3.0)))
    spans = step_time(wb.Synchronous(bucket_bytes=WHOLE), curves=(slow,)).timeline.spans(0)
    sums = {span.label: span.seconds for span in spans if span.op == "all_reduce"}
    assert sums["status"] == pytest.approx(3.0)
    assert sums["gradients"] < 1.0
    graph = graphs.mlp(400, 200, 100)
    plan = Plan.hybrid(graph, 4)
    run = wb.Experiment(plan=plan, data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=4)
    cut = wb.predict(plan, machine(within=link(curves=(slow,))), run).timeline.spans(0)
    taken = [s.seconds for s in cut if s.op == "all_reduce" and s.what == "collective"]
    assert taken == pytest.approx([3.0] * len(taken))


def test_a_scaled_loss_takes_two_passes_and_eight_bytes():
    """Of gradients, at 10^9 bytes a second: read, and written unscaled."""
    plan = Plan.data_parallel(ONE, 4)
    toy = machine(device(bandwidth=1e9, call_s=0.0), within=link(latency_s=ALPHA, bandwidth=1e9))

    def predicted(precision):
        run = wb.Experiment(
            plan=plan,
            optimizer=wb.SGD(lr=0.1),
            steps=1,
            batch_size=4,
            data="digits",
            precision=precision,
        )
        return wb.predict(plan, toy, run)

    scaled = predicted("fp16")
    (sum_,) = [s.seconds for s in scaled.timeline.spans(0) if s.label == "unscale" and s.op]
    added = sum(s.seconds for s in scaled.timeline.spans(0) if s.label == "unscale" and not s.op)
    assert (added, sum_ > 0) == (pytest.approx(2 * BYTES / 1e9, rel=1e-6), True)
    assert not [s for s in predicted("bf16").timeline.spans(0) if s.label == "unscale"]


def test_clipping_and_averages_take_their_passes_and_eight_bytes():
    """One pass for the norm and two to scale it, five for averages, at 10^9 bytes a second."""
    plan = Plan.data_parallel(ONE, 4)
    toy = machine(device(bandwidth=1e9, call_s=0.0), within=link(latency_s=ALPHA, bandwidth=1e9))

    def predicted(**fields):
        run = wb.Experiment(
            plan=plan, optimizer=wb.SGD(lr=0.1), steps=1, batch_size=4, data="digits", **fields
        )
        return wb.predict(plan, toy, run)

    plain, averaged, clipped = predicted(), predicted(ema=0.9), predicted(clip_norm=1.0)
    assert averaged.step_time - plain.step_time == pytest.approx(5 * BYTES / 1e9, rel=1e-6)
    (sum_,) = [s.seconds for s in clipped.timeline.spans(0) if s.label == "clip" and s.op]
    added = clipped.step_time - plain.step_time
    assert added == pytest.approx(3 * BYTES / 1e9 + sum_, rel=1e-6)
    assert predicted(clip_value=1.0).step_time - plain.step_time == pytest.approx(
        2 * BYTES / 1e9, rel=1e-6
    )
